"""Whether runs are of one federation: of different ones no two numbers can be compared, whatever the methods."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, counted
from coterie.running.folder import Folder
from coterie.running.result import Result

ASIDE = ("data", "encoding", "notes", "classes", "churn", "split", "sites")
"""Parts of a recipe that are no way of dealing the data: named apart, read from it, or compared by what came out."""
OF_A_SEED = ("sizes", "tested")
"""Facts that only runs of one seed must share: seeds may stand for splits of the same data."""


@dataclass(frozen=True)
class Known:
    """What is known of a run's federation: its facts by name, and the words for them."""

    facts: Mapping[str, Any]
    words: str


def one_federation(results: Sequence[Result]) -> None:
    """Raise where two runs hold other clients, classes or data; what a run does not say is not held against it."""
    alive = [result.simulation.federation for result in results if result.simulation is not None]
    if len(alive) == len(results) and all(one is alive[0] for one in alive):
        return
    if results[0].folder is not None and all(result.folder == results[0].folder for result in results):
        return
    known = [(result, _known(result)) for result in results]
    first: dict[int, tuple[Result, Known]] = {}  # of each seed
    for result, its in known:
        for other in (known[0], first.setdefault(result.seed, (result, its))):
            _same(*other, result, its)


def federation_words(config: Mapping[str, Any], clients: int, trained: int) -> list[str]:
    """The data, how they were dealt, and how many clients that made: `digits`, `dirichlet 0.5`, `8 clients`."""
    recipe = config.get("federation") or {}
    found = [Path(str(recipe["data"])).name] if "data" in recipe else []
    if "partition" in recipe:
        found.append(" ".join(str(recipe[name]) for name in ("partition", "alpha") if name in recipe))
    more = f" and {clients - trained} unseen" if clients > trained else ""
    return [*found, f"{counted(trained, 'client')}{more}"]


def _same(one: Result, its: Known, other: Result, mine: Known) -> None:
    both = [name for name in its.facts if name in mine.facts and (one.seed == other.seed or name not in OF_A_SEED)]
    if all(its.facts[name] == mine.facts[name] for name in both):
        return
    differ = next(name for name in both if its.facts[name] != mine.facts[name])
    why = f", which differ in {WORDS[differ.split()[0]]}" if its.words == mine.words else ""
    raise CoterieError(
        f"{_called(one)} ({its.words}) and {_called(other)} ({mine.words}) are runs on different federations{why}: "
        "their numbers cannot be compared, so no table or report holds both. Show and report them one by one."
    )


WORDS = {
    "task": "their classes", "names": "the names of their clients", "trained": "how many clients train",
    "data": "their data", "dealt": "how the data were dealt", "sizes": "how many test samples their clients have",
    "tested": "the classes of their clients' test samples",
}
"""What a fact is about, for a reader to whom both federations would be described alike."""


def _called(result: Result) -> str:
    return str(result.folder) if result.folder is not None else result.method


def _known(result: Result) -> Known:
    if result.folder is not None:
        path = Path(result.folder)
        return _of_folder(path, tuple(_stamp(path / name) for name in ("config.json", "data.json")))
    if result.simulation is None:
        return Known({"names": list(result.names)} if result.names else {}, counted(len(result.names), "client"))
    federation = result.simulation.federation
    data = {"classes": federation.classes, "sizes": {"test": federation.sizes("test").tolist()}}
    if federation.classes:
        data["tested"] = federation.histogram("test").tolist()
    config = {"federation": federation.recipe, "clients": list(federation.names), "population": federation.trained}
    return _told(config, data)


def _stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@lru_cache(maxsize=512)
def _of_folder(path: Path, stamp: tuple[int, ...]) -> Known:
    """Read once for as long as the files are as they were: every table of a report asks."""
    folder = Folder(path)
    try:
        return _told(folder.config(), folder.data() or {})
    except (TypeError, ValueError, KeyError, AttributeError) as reason:
        raise CoterieError(f"{path / 'config.json'} is damaged: it does not say what it was trained on.") from reason


def _told(config: Mapping[str, Any], data: Mapping[str, Any]) -> Known:
    recipe = config.get("federation") or {}
    names = [str(name) for name in config.get("clients") or ()]
    trained = int(config.get("population", len(names)))
    samples = config.get("samples") or config.get("job") or data
    facts: dict[str, Any] = {
        "task": samples.get("classes"), "names": names or None, "trained": trained or None,
        "data": Path(str(recipe["data"]).partition(":")[0]).name if "data" in recipe else None,
        **{f"dealt {name}": _text(value) for name, value in recipe.items() if name not in ASIDE},
        "sizes": _text(data["sizes"]["test"]) if "sizes" in data else None,
        "tested": _text(data["tested"]) if "tested" in data else None,
    }
    words = federation_words(config, len(names), trained)
    if samples.get("classes") is not None:
        classes = int(samples["classes"])
        words.append(counted(classes, "class", "classes") if classes else "numbers as targets")
    return Known({name: fact for name, fact in facts.items() if fact is not None}, ", ".join(words))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
