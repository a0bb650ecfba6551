"""Runs on different federations are in no table and no report together, and the sentence says which they are."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.data import Federation, digits, partition
from coterie.errors import CoterieError
from coterie.models import model
from coterie.report.contents import gather
from coterie.report.table import comparison
from coterie.report.verdict import verdict

OPTIONS = {"rounds": 1, "device": "cpu"}


def dealt(kind, clients=4, seed=0, **more):
    """400 digits, dealt to clients that are called 0, 1, ... whoever they are."""
    x, y = (part[:400] for part in digits())
    made = Federation.from_assignment(x, y, partition(kind, y.numpy(), clients, seed=seed, **more))
    return made


def trained(method, federation, folder=None, **more):
    return coterie.run(method, model("linear", (1, 8, 8), 10), federation, folder=folder, **OPTIONS | more)


def test_the_same_names_do_not_make_the_same_federation(tmp_path):
    """Four clients 0 to 3 both times; the command line deals the same digits in two ways, to as many clients."""
    for kind, method in (("iid", "fedavg"), ("dirichlet:alpha=0.3", "local")):
        words = ["run", method, "--clients", "4", "--partition", kind, "--model", "linear", "--rounds", "1", "--set",
                 "device=cpu", "--out", str(tmp_path / method)]
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    done = CliRunner().invoke(app, ["report", str(tmp_path / "fedavg"), str(tmp_path / "local")])
    assert isinstance(done.exception, CoterieError)
    assert str(done.exception) == (
        f"{tmp_path / 'fedavg'} (digits, iid, 4 clients, 10 classes) and {tmp_path / 'local'} (digits, dirichlet 0.3, "
        "4 clients, 10 classes) are runs on different federations: their numbers cannot be compared, so no table or "
        "report holds both. Show and report them one by one."
    )


def test_two_comparisons_on_other_data_are_not_said_to_repeat_a_seed(tmp_path):
    """Both hold local and fedavg with seed 0, which is true of all comparisons, and not what is wrong here."""
    for name, federation in (("a", dealt("iid")), ("b", dealt("iid", seed=1))):
        coterie.compare([], model("linear", (1, 8, 8), 10), federation, folder=tmp_path / name, **OPTIONS)
    with pytest.raises(CoterieError, match="are runs on different federations, which differ in the classes of their"):
        gather([tmp_path / "a", tmp_path / "b"])


def test_other_clients_and_other_targets_are_named(tmp_path):
    trained("fedavg", dealt("iid"), tmp_path / "four")
    trained("local", dealt("iid", clients=5), tmp_path / "five")
    with pytest.raises(CoterieError, match=r"four \(4 clients, 10 classes\) and .*five \(5 clients, 10 classes\) are"):
        gather([tmp_path / "four", tmp_path / "five"])
    inputs = torch.randn(4, 20, 3, generator=torch.Generator().manual_seed(0))
    numbers = Federation.from_clients([(x, x.sum(1)) for x in inputs])
    coterie.run("fedavg", lambda: torch.nn.Linear(3, 1), numbers, folder=tmp_path / "numbers", **OPTIONS)
    with pytest.raises(CoterieError, match=r"numbers \(4 clients, numbers as targets\) are runs on different fed"):
        gather([tmp_path / "four", tmp_path / "numbers"])


@pytest.mark.parametrize("shown", [comparison, verdict])
def test_tables_and_verdicts_in_python_refuse_them_too(shown):
    runs = [trained("fedavg", dealt("iid")), trained("local", dealt("dirichlet", alpha=0.3))]
    with pytest.raises(CoterieError, match="are runs on different federations"):
        shown(runs)


def test_one_federation_is_recognised_wherever_it_is_written_down(tmp_path):
    """In memory and in a folder; with other training options; and as an earlier version described it, with less."""
    federation = dealt("iid")
    runs = [trained("fedavg", federation), trained("local", federation, tmp_path / "local", lr=0.2)]
    assert "local" in verdict(runs)
    shutil.copytree(tmp_path / "local", tmp_path / "old")
    record = json.loads((tmp_path / "old" / "data.json").read_text())
    del record["tested"]
    (tmp_path / "old" / "data.json").write_text(json.dumps(record))
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    del config["samples"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config | {"method": "fedavg"}))
    assert [m["name"] for m in gather([tmp_path / "local", tmp_path / "old"])["methods"]] == ["local", "fedavg"]


def test_seeds_may_stand_for_splits_of_the_data():
    """Each method has run with seed 0 on one split and with seed 1 on another: seed by seed they are comparable."""
    splits = {seed: dealt("iid", seed=seed) for seed in (0, 1)}
    runs = [trained(name, splits[seed], seed=seed) for name in ("local", "fedavg") for seed in splits]
    assert "For the mean over clients" in verdict(runs)
    with pytest.raises(CoterieError, match="are runs on different federations"):
        verdict([*runs[:3], trained("fedavg", splits[0], seed=1)])
