"""An experiment as text: data, partition, model, methods, training; from a TOML file, a folder or the command line.

In Python it runs in one call, as `coterie run` and `coterie compare` would run it:

    coterie.experiment("file.toml").run("runs/mine")
"""

from __future__ import annotations

import os
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn

from coterie import files, registry
from coterie.contract.local import LocalOptions
from coterie.contract.method import Method
from coterie.contract.shapes import FewModels
from coterie.contract.units import Unit
from coterie.data import Federation, Source, churn, groups, load, load_as, natural, partition, published, spelled
from coterie.data.partition import require_options
from coterie.data.readers.tables.schema import unit_of
from coterie.errors import CoterieError, counted, unknown
from coterie.models.lora import LoRA
from coterie.options import LONGEST_DATA, added, build, options, parse_options, pieces, require_short
from coterie.running.folder import Folder, environment, sealed, unedited
from coterie.running.result import Result
from coterie.running.runs import Prepared, Watch, prepare_comparison, prepare_run, with_baselines
from coterie.running.spec import PARTS, RunSpec
from coterie.running.training import Training
from coterie.trust import code

Part = TypeVar("Part", bound=Callable[..., Any])

DEFAULT_PARTITION = "dirichlet:alpha=0.5"
DEFAULT_METHODS = ("fedprox", "fedper", "ifca", "fedfew")
"""What a comparison holds beside the baselines where nobody named a method."""
EXPERIMENT = "experiment.json"
"""What was asked for, in the folder of a run or of a comparison."""
LISTS = ("watch",)
"""Training options that add up where they are set more than once."""
FLAGS = (
    "data", "data_dir", "partition", "clients", "unseen", "churn", "model", "head", "adapter", "freeze",
    "train", "loss", "seeds",
)
"""Settings of an experiment that the command line has a flag for."""
CODE = "code"
"""Of experiment.json: the code files that the experiment names, each with the digest of its content."""
FORMER = {"model": "model.py", "loss": "loss.py"}
"""Where earlier versions kept copies of the files of a model and a loss."""


def _asking(part: Part) -> Part:
    """Of an experiment from a file this part runs what the user's list holds, and nothing else."""

    @wraps(part)
    def asking(self: Experiment, *args: Any, **kwargs: Any) -> Any:
        with code.foreign() if self.foreign else nullcontext():
            return part(self, *args, **kwargs)

    return cast("Part", asking)


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a result. `federation()`, `factory()` and `chosen()` build the parts."""

    data: str = "digits"
    """`digits`, the path of a file or folder, with options as in `table.csv:label=species,client=site`, or the name of
    a published set, whose files lie in `data_dir`."""
    data_dir: str = ""
    """The folder with the original files of a published set."""
    partition: str = ""
    """`name:option=value,...`; by default natural where the data name their clients, else dirichlet:alpha=0.5."""
    clients: int = 20
    """Clients that train (a natural partition takes all of them)."""
    unseen: int = 0
    """Further clients kept out of training."""
    val: float = 0.1
    """Fraction of a client's training data held back for validation."""
    test: float = 0.25
    """Fraction of a client's data held back for testing."""
    churn: str = ""
    """Clients that come and go: `random:rate=0.1,...`, or the path of a csv file with client, arrives, leaves."""
    data_seed: int = 0
    """Seed of partition and splits; it stays the same for all seeds of a comparison."""
    model: str = "mlp"
    """`name:option=value,...`: linear, mlp, cnn, resnet18, textcnn, fasttext, sensor, `file.py:Net:option=value`, or a
    pretrained one: minilm, mobilenetv2, efficientnet-lite0, -lite1, -lite2, `hf:FOLDER`."""
    head: str | None = None
    """The layer that makes the scores, when it is not the last linear one."""
    adapter: str = ""
    """Low-rank adapters beside the layers of the model, which is frozen but for its head: `lora:rank=8,targets=q+v`."""
    freeze: str = ""
    """What of the model does not train: parts (`base`, `head`), modules or parameters, joined by `+`; `*` is any text,
    as in `layer1*`."""
    train: str = ""
    """What of the model trains, all else being frozen; as `freeze`, e.g. `head` or `layer4*+head`."""
    loss: str = ""
    """A loss of your own, `file.py:function` of outputs and labels, one number for each sample; by default the cross
    entropy, or the squared error for regression."""
    methods: tuple[str, ...] = ()
    """What is compared, as in `["fedper", "fedfew:models=3"]`; `local` and `fedavg` take part as well."""
    baselines: bool = True
    """Whether `local` and `fedavg` take part in a comparison that does not name them."""
    seeds: int = 1
    """Runs of each method in a comparison, which differ in the seed alone."""
    about: str = ""
    """A line for people."""
    published: dict[str, str] = field(default_factory=dict)
    """What a paper printed, by method (name, or name+aggregator), in % with its spread; shown beside our numbers."""
    training: Training = field(default_factory=Training)
    foreign: bool = field(default=False, compare=False, repr=False, metadata={"option": False})
    """Whether it stood in a file that somebody else may have written, so that its code files ask before they run."""

    def __post_init__(self) -> None:
        require_short({name: value for name, value in vars(self).items() if name != "data"}, "the experiment")
        require_short({"data": self.data}, "the experiment", LONGEST_DATA)

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "the experiment") -> Experiment:
        """From plain values, e.g. a TOML file's; every unknown name suggests the nearest known one."""
        table = values.get("training", {}) if isinstance(values, Mapping) else None
        if not isinstance(values, Mapping) or not isinstance(table, Mapping):
            raise CoterieError(f"{where} and its training must be tables of settings, not {values!r}.")
        given = dict(values)
        training = build(Training, given.pop("training", {}), "training")
        methods = given.pop("methods", ())
        if not isinstance(methods, list | tuple) or not all(isinstance(m, str) for m in methods):
            raise CoterieError(f"methods in {where} must be a list of names, not {methods!r}.")
        printed = given.pop("published", {})
        if not isinstance(printed, Mapping) or not all(isinstance(v, str | int | float) for v in printed.values()):
            raise CoterieError(f"published in {where} must be a table of method = value, not {printed!r}.")
        for name in given:
            if name not in options(cls):
                raise unknown(f"setting in {where}", name, options(cls))
        made = build(cls, given, where)
        if made.seeds < 1 or made.clients < 1 or made.unseen < 0:
            raise CoterieError(f"seeds and clients must be at least 1 and unseen at least 0 in {where}.")
        shown = {name: str(value) for name, value in printed.items()}
        return replace(made, methods=tuple(methods), training=training, published=shown)

    @classmethod
    def read(cls, path: Path, released: bool = False) -> Experiment:
        """From a TOML file; relative paths are taken from the file's own folder, and files that it names are not run.

        `extends` names a file beside it that is read first. The table `released` holds what a paper's released program
        does otherwise; it counts with `released` only.
        """
        values = read_toml(path)
        program = values.pop("released", {})
        with code.nothing():
            made = cls.of(_with_metrics(_over(values, program) if released else values, path.parent), str(path))
            own: dict[str, Any] = {
                name: code.absolute(getattr(made.training, name), path.parent) for name in registry.OPTIMIZERS
            }
            made = replace(made, methods=tuple(code.absolute(spec, path.parent) for spec in made.methods),
                           training=replace(made.training, **own))
        data, _ = spelled(made.data)
        beside = path.parent / data
        if data != "digits" and data not in published.SETS and os.path.exists(beside):
            made = replace(made, data=f"{beside}{made.data.removeprefix(data)}")
        listed = path.parent / made.churn
        made = replace(made, churn=str(listed)) if made.churn.endswith(".csv") and os.path.exists(listed) else made
        made = replace(made, model=code.absolute(made.model, path.parent), loss=code.absolute(made.loss, path.parent),
                       data=code.absolute(made.data, path.parent))
        code.mark(made.spellings())
        return replace(made, foreign=True)

    def of_its_data(self) -> Experiment:
        """Its data and how they are dealt, with the usual method, model and training."""
        usual = Experiment()
        return replace(self, methods=(), model=usual.model, loss="", training=usual.training)

    def spellings(self) -> list[str]:
        """Every text that may name a code file."""
        training = self.training
        named = (getattr(training, name) for name in registry.OPTIMIZERS)
        return [*self.methods, self.model, self.loss, self.data, *named, *training.metrics]

    def _spelled(self, of: Callable[[str], str]) -> Experiment:
        """With every such text as `of` spells it; runs no file."""
        own: dict[str, Any] = {name: of(getattr(self.training, name)) for name in (*registry.OPTIMIZERS, "metric")}
        own["watch"] = tuple(map(of, self.training.watch))
        with code.nothing():
            training = replace(self.training, **own)
        return replace(self, methods=tuple(map(of, self.methods)), model=of(self.model), loss=of(self.loss),
                       data=of(self.data), training=training)

    def allowed(self, where: str, trust: bool = False) -> Experiment:
        """Itself, as it stands in a file that somebody else may have written; raises where it would run a code file
        that is not trusted, or write outside its folder. With `trust` it may, from now on."""
        code.require(self.spellings(), where, trust)
        schema = spelled(self.data)[1].get("schema")
        if isinstance(schema, str) and not os.path.exists(schema) and not trust:
            raise CoterieError(f"{where} asks for a new file, the schema {schema} of its table; nothing was written. "
                               "Allow it with --trust (trust=True in Python).")
        with code.foreign():
            return replace(self, training=replace(self.training), foreign=True)  # optimizers in files are looked at

    def record(self) -> dict[str, Any]:
        """As plain values that `of` reads back, paths as seen from anywhere."""
        data, _ = spelled(self.data)
        local = data != "digits" and data not in published.SETS and os.path.exists(data)
        whole = f"{Path(data).resolve()}{self.data.removeprefix(data)}" if local else self.data
        place = str(Path(self.data_dir).resolve()) if self.data_dir else ""
        when = str(Path(self.churn).resolve()) if self.churn.endswith(".csv") else self.churn
        plain = {name: value for name, value in asdict(self).items() if name != "foreign"}
        return {
            **plain, "methods": list(map(code.absolute, self.methods)), "data": code.absolute(whole),
            "data_dir": place, "churn": when, "model": code.absolute(self.model), "loss": code.absolute(self.loss),
        }

    def federation(self, run: RunSpec | None = None) -> Federation:
        """Load, deal and split the data; with churn, say who is there when.

        With a `run` of this experiment, y is what it was for that run: earlier versions took whole numbers kept as
        floats for classes, counted classes from 0, and left targets as they are.
        """
        return self.dealt(self.source(run), run)

    def dealt(self, source: Source, run: RunSpec | None = None) -> Federation:
        """The federation that these samples make."""
        made = self._dealt(source, run).looked_at()
        return churn.scheduled(made, self.churn) if self.churn else made

    def _dealt(self, source: Source, run: RunSpec | None) -> Federation:
        known = {"notes": list(source.notes), "classes": list(source.classes or ()), "encoding": source.encoding}
        recipe: dict[str, Any] = {"data": self.data, **{name: value for name, value in known.items() if value}}
        shares: dict[str, Any] = {"val": self.val, "test": self.test, "unseen": self.unseen, "seed": self.data_seed}
        shares["classes"] = source.vocabulary or (None if source.classes is None else len(source.classes))
        shares["unit"] = unit_of(source.encoding)
        if run is not None:
            shares["classes"] = shares["classes"] if run.class_names else run.classes
            shares["unit"] = Unit.of(run.unit)
        name, given = parse_options(self.partition or ("natural" if source.client is not None else DEFAULT_PARTITION))
        if source.encoding is not None and source.client is None and not self.partition:
            recipe.setdefault("notes", []).append(
                f"no column says who holds what, so samples are dealt to {self.clients} made-up clients ({name}); "
                "client=COLUMN names the clients, --partition chooses another way to deal"
            )
        recipe |= {"partition": name, **given}
        require_options(name, given)
        shares["group"] = source.group
        if name == "natural":
            if source.client is None:
                raise CoterieError(f"{self.data} names no clients, so a natural partition is impossible; use another.")
            assignment, names = natural(source.client, **given)
            return Federation.from_assignment(
                source.x, source.y, assignment, names=names, recipe=recipe, given=source.split, **shares
            )
        total = self.clients + self.unseen
        if source.group is None:
            assignment = partition(name, source.y.numpy(), total, seed=self.data_seed, **given)
        else:
            whose = groups.coded(source.group, len(source.x))
            assignment = groups.dealt_whole(name, source.y.numpy(), whose, total, seed=self.data_seed, **given)
        return Federation.from_assignment(source.x, source.y, assignment, recipe=recipe, **shares)

    @_asking
    def source(self, run: RunSpec | None = None) -> Source:
        """The samples, before they are dealt to clients; with a `run`, as they were for it."""
        if self.data.partition(":")[0] not in published.SETS:
            return load(self.data) if run is None else load_as(self.data, run.classes)
        name, given = parse_options(self.data)
        return published.load(name, self.data_dir, **given)

    def spec(self, federation: Federation, method: str = "") -> RunSpec:
        """One of its runs on this federation's samples, as every other place writes it down."""
        return RunSpec.for_data(
            federation, method=method, model=self.model, training=self.training, head=self.head,
            adapter=self.adapter, freeze=self.freeze, train=self.train, loss=self.loss,
            encoding=federation.recipe.get("encoding"),
        )

    @_asking
    def factory(self, federation: Federation) -> Callable[[], nn.Module]:
        """The model for this federation's samples."""
        return self.spec(federation).factory()

    @_asking
    def chosen(self) -> list[Method]:
        return [registry.method(spec) for spec in self.methods]

    def expanded(self, methods: Iterable[str]) -> tuple[str, ...]:
        """Spellings of methods, with all that this model's adapters allow in place of the word `all`."""
        return registry.expand(methods, bool(self.adapter), not self.adapter or LoRA.of(self.adapter).base == "frozen")

    def fitting(self, clients: int) -> tuple[Experiment, list[str]]:
        """Without the methods that have more models than there are clients, and a note on each of these."""
        built = {spec: registry.method(spec) for spec in self.methods}
        many = {spec: one.models for spec, one in built.items() if isinstance(one, FewModels) and one.models > clients}
        held = counted(clients, "client")
        notes = [f"{spec} is left out of the usual comparison: it has {models} models for {held}; `coterie compare "
                 f"{built[spec].name}:models={clients}` takes it" for spec, models in many.items()]
        return replace(self, methods=tuple(spec for spec in self.methods if spec not in many)), notes

    def planned(self) -> list[Method]:
        """What a comparison runs, with every seed."""
        return with_baselines(self.chosen(), self.baselines)

    def count(self, single: bool) -> int:
        """How many runs that makes; no file is run for that, so a method in a file is one of its own."""
        if single:
            return 1
        built, lost = [], set()
        for spec in self.methods:
            try:
                with code.nothing():
                    built.append(registry.method(spec))
            except CoterieError:
                lost.add(spec)
        return (len(with_baselines(built, self.baselines)) + len(lost)) * self.seeds

    @_asking
    def changed(self, methods: Sequence[str] = (), settings: Iterable[str] = (), **values: Any) -> Experiment:
        """With these values in place of its own, those that are None left as they are; `settings` as in `--set`."""
        given = {name: value for name, value in values.items() if value is not None}
        base = Experiment.of({**self.record(), **given}, "the command line")
        chosen = base.expanded(methods or base.methods)
        return with_settings(replace(base, methods=chosen, foreign=self.foreign), settings)

    # -- running it ------------------------------------------------------------------------------------------------

    @_asking
    def run(
        self, folder: str | Path | None = None, watch: Watch | None = None, resume: bool = False,
        single: bool | None = None,
    ) -> list[Result]:
        """Train one method by itself, several as a comparison; the rows are those of `coterie run` and `compare`.

        With a `folder` everything is recorded there, and `resume` goes on with what it holds. `single=False` also
        compares one method with the baselines.
        """
        whole = replace(self, methods=self.expanded(self.methods or DEFAULT_METHODS))
        for said in (said for spec in whole.methods for said in registry.renamed(spec)):
            warnings.warn(said, stacklevel=2)
        single = len(whole.methods) == 1 if single is None else single
        place = None if folder is None else Path(folder)
        begun = resume and place is not None and (place / EXPERIMENT).exists()
        if begun and place is not None and asked_for(place)[:2] != (Experiment.of(whole.record()), single):
            raise CoterieError(f"{place} holds a run of another experiment; choose another folder.")
        prepared = whole.prepare(whole.federation(recorded(place) if begun else None), place, single, begun)
        if place is not None and not begun:
            whole.keep(place, single)
        return prepared.go(watch)

    @_asking
    def prepare(
        self, federation: Federation, folder: Path | None = None, single: bool = False, resume: bool = False
    ) -> Prepared:
        """Its runs, ready to start; raises if one of them cannot, before anything is trained or written."""
        training, methods = asdict(self.training), self.chosen()
        chosen: dict[str, Any] = {"head": self.head, **{name: getattr(self, name) for name in PARTS}}
        factory = replace(self, adapter="", freeze="", train="").factory(federation)  # the runs write them down
        chosen["loss"] = self.spec(federation).own_loss()
        if single:
            if len(methods) != 1:
                raise CoterieError(f"one method runs by itself, not {len(methods)}: {', '.join(self.methods)}.")
            started = resume and folder is not None and (folder / "config.json").exists()
            return prepare_run(
                methods[0], factory, federation, folder=folder, resume=started, **chosen, **training
            )
        first = training.pop("seed")
        return prepare_comparison(
            methods, factory, federation, seeds=range(first, first + self.seeds), folder=folder, resume=resume,
            baselines=self.baselines, **chosen, **training,
        )

    def keep(
        self, folder: Path, single: bool, command: Sequence[str] = (), name: str = EXPERIMENT, **beside: Any
    ) -> None:
        """Write down what is about to run, and the `command` that asked for it; refuses a folder that holds a run.

        Another file than experiment.json is for who runs several experiments, and what else was asked for `beside`.
        """
        path = folder / name
        if path.exists():
            if asked_for(folder, name)[0].record() != self.record():
                raise CoterieError(f"{folder} already holds a run of another experiment; choose another --out.")
            raise CoterieError(
                f"{folder} already holds a run; `coterie resume {folder}` goes on, or choose another --out."
            )
        asked = {"command": list(command)} if command else {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files.refuse_links(folder)
            kept = code.keep(folder, self.spellings())
            record = {"single": single, "experiment": self.record(), **asked, **beside,
                      **({CODE: kept} if kept else {})}
            files.write_json(path, sealed({**record, "environment": environment()}))
        except OSError as reason:
            raise CoterieError(f"the run folder {folder} cannot be written: {reason.strerror}.") from reason


def experiment(source: str | Path | Mapping[str, Any], trust: bool = False) -> Experiment:
    """The experiment of a TOML file, or of the values such a file would hold.

    Code files that the TOML file names run if you have named them yourself before, or with `trust`.
    """
    if isinstance(source, Mapping):
        return Experiment.of(source)
    return Experiment.read(Path(source)).allowed(str(source), trust)


# -- experiment.json: what a folder's runs were asked for --------------------------------------------------------------


def recorded(folder: Path | None) -> RunSpec | None:
    """What a folder's runs wrote down of their samples; None before the first of them began."""
    for path in [] if folder is None else [folder, *sorted(path.parent for path in folder.glob("*/config.json"))]:
        config = Folder(path).config() if (path / "config.json").is_file() else {}
        if config.get("samples"):
            return RunSpec.of_config(config)
    return None


@code.foreign()
def read_experiment(folder: Path, trust: bool = False, name: str = EXPERIMENT) -> tuple[Experiment, bool, str]:
    """The experiment to go on with, whether it is a single run, and sentences where files are not what they were.

    Code files are taken from the copies in the run folder. They run if this user has trusted them, or with `trust`. A
    record that was edited is refused.
    """
    found, single, record = asked_for(folder, name)
    unedited(record, folder / name)
    kept = code.Copies(folder, record.get(CODE), _former(found, record))
    if trust:
        kept.trust()
    kept.take()
    return found._spelled(kept.spelled).allowed(str(folder / name), trust), single, " ".join(kept.notes)


def asked_for(folder: Path, name: str = EXPERIMENT) -> tuple[Experiment, bool, dict[str, Any]]:
    """What experiment.json, or the file of this `name`, says: the experiment, whether it is a single run, and the whole
    record; runs no file."""
    path = folder / name
    if not path.is_file():
        why = f"it has no {name}" if folder.exists() else "it does not exist"
        raise CoterieError(f"{folder} is not a run folder: {why}.")
    record = files.read_json(path)
    if not {"experiment", "single"} <= record.keys():
        raise CoterieError(f"{path} is damaged: it does not say what was asked for.")
    try:
        with code.nothing():
            return Experiment.of(record["experiment"], str(path)), bool(record["single"]), record
    except (ValueError, LookupError, TypeError, AttributeError) as reason:
        if isinstance(reason, CoterieError):
            raise
        raise CoterieError(f"{path} is damaged: {reason}.") from reason


def _former(found: Experiment, record: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Copies that an earlier version made of the files of model and loss: path -> name in the folder, digest."""
    former = {}
    for name, copy in FORMER.items():
        named, kept = files.in_file(getattr(found, name)), record.get(f"{name}_file")
        if named is not None and isinstance(kept, Mapping):
            former[named[0]] = (copy, str(kept.get("sha256")))
    return former


# -- TOML and settings -------------------------------------------------------------------------------------------------


def read_toml(path: Path, depth: int = 0) -> dict[str, Any]:
    """The values of a TOML file over those of the file that it `extends`."""
    try:
        values = tomllib.loads(files.read_text(path, files.MOST))
    except CoterieError:
        raise
    except ValueError as reason:  # a name with a zero byte is one too
        raise CoterieError(f"{path} is not valid TOML: {reason}.") from reason
    except RecursionError:
        raise CoterieError(f"{path} is not valid TOML: it is nested too deeply.") from None
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str) or depth > 3:
        raise CoterieError(f"extends in {path} must name one other file, at most four in a row, not {base!r}.")
    return _over(read_toml(path.parent / base, depth + 1), values)


def _over(base: dict[str, Any], values: Any) -> dict[str, Any]:
    """The base with these values in place of its own; tables are merged, and `published` is replaced whole."""
    if not isinstance(values, dict):
        raise CoterieError(f"released must be a table of settings, not {values!r}.")
    merged = dict(base)
    for name, value in values.items():
        both = isinstance(value, dict) and isinstance(base.get(name), dict) and name != "published"
        merged[name] = _over(base[name], value) if both else value
    return merged


def _with_metrics(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The values with metrics from files named as seen from the TOML file's own folder."""
    training = values.get("training")
    if not isinstance(training, dict):
        return values
    near = {name: training[name] for name in ("metric", "watch") if name in training}
    for name, value in near.items():
        if isinstance(value, str):
            near[name] = ",".join(code.absolute(spec, folder) for spec in pieces(value))
        elif isinstance(value, list):
            near[name] = [code.absolute(spec, folder) if isinstance(spec, str) else spec for spec in value]
    return {**values, "training": {**training, **near}}


def with_settings(experiment: Experiment, settings: Iterable[str]) -> Experiment:
    """Apply `name=value` settings: training options, `method.option`, or an option of any chosen method."""
    training, per_method = _taken(experiment.methods, settings)
    methods = tuple(
        registry.spelling(registry.method(spec, **values)) if values else spec for spec, values in per_method.items()
    )
    merged = build(Training, {**asdict(experiment.training), **training}, "training")
    return replace(experiment, methods=methods, training=merged)


def renamed(methods: Iterable[str], settings: Iterable[str]) -> list[str]:
    """A sentence for each option, of these methods or in `settings`, that is called otherwise now."""
    per_method = _taken(registry.expand(methods), settings)[1]
    return [note for spec, values in per_method.items() for note in registry.renamed(spec, **values)]


def _taken(methods: Sequence[str], settings: Iterable[str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Settings that are the run's training options, and those of each method, by its spelling.

    `moon.mu=0.5` goes before `mu=0.1`, which is for every chosen method that has the option.
    """
    training: dict[str, str] = {}
    per_method: dict[str, dict[str, str]] = {spec: {} for spec in methods}
    named: dict[str, dict[str, str]] = {spec: {} for spec in methods}
    classes = {spec: type(registry.method(spec)) for spec in methods}
    given = []
    for item in settings:
        name, equals, value = item.partition("=")
        if not equals:
            raise CoterieError(f"--set wants name=value, not '{item}'.")
        given.append((name, value))
        if name in options(Training):
            added(training, name, value, " ".join(f"{n}={v}" for n, v in given), LISTS)
            continue
        owner, dot, option = name.partition(".")
        if not dot:
            owner, option = "", name
        takers = [s for s, cls in classes.items() if owner in ("", cls.name) and registry.takes(cls, option)]
        if not takers and name in options(Experiment):
            flag = f"--{name.replace('_', '-')} {value}" if name in FLAGS else f"a file for --config, with {name} = ..."
            raise CoterieError(f"{name} is no training option but a setting of the experiment: write {flag}; `coterie "
                               "options` explains both.")
        if not takers:
            known = {*options(Training), *(o for cls in classes.values() for o in options(cls) if o != "aggregator")}
            words = {**Training.OTHER_WORDS, **Training.FORMER}
            if mine := [cls for cls in classes.values() if cls.name == owner]:
                known = {*options(mine[0]), *options(LocalOptions)} - {"aggregator"}
                raise unknown(f"option of {owner}", option, known, {**words, **LocalOptions.of_the_run()}, "", value)
            raise unknown("option", name, known, words, Training.LISTED, value)
        for spec in takers:
            added((named if owner else per_method)[spec], option, value, " ".join(f"{n}={v}" for n, v in given))
    return training, {spec: {**values, **named[spec]} for spec, values in per_method.items()}


def check_clients(federation: Federation, asked: int | None) -> Federation:
    """The federation, unless a number of clients was asked for and the data have clients of their own."""
    if asked is not None and federation.recipe.get("partition") == "natural":
        raise CoterieError(f"the data bring {counted(federation.clients, 'client')} of their own, so --clients does "
                           f"not apply; --partition {DEFAULT_PARTITION} would deal them anew.")
    return federation
