"""Options are used or refused: one that stands twice adds up or is an error, and unknown ones say what to write."""

from __future__ import annotations

import dataclasses

import pytest

from coterie import registry
from coterie.contract.local import LocalOptions
from coterie.data import Federation, load
from coterie.data.augment import Augment
from coterie.data.churn import scheduled
from coterie.errors import CoterieError, unknown
from coterie.running.experiment import Experiment, with_settings
from coterie.running.training import Training


def federation() -> Federation:
    import numpy as np

    x, y = np.zeros((8, 2), np.float32), np.array([0, 1] * 4)
    return Federation.from_clients([(x, y), (x, y)])


TWICE = {
    "a model": lambda: Experiment(model="mlp:hidden=4,hidden=8").spec(federation()).factory(),
    "a partition": lambda: Experiment(partition="dirichlet:alpha=1,alpha=2", clients=3).federation(),
    "a method": lambda: registry.method("fedprox:mu=0.1,mu=0.2"),
    "a method's training option": lambda: registry.method("fedper:lr=0.1,training.lr=0.2"),
    "an aggregator": lambda: registry.method("fedavg+trimmedmean:trim=0.1,trim=0.2"),
    "presets of a method": lambda: registry.method("fedfew:official,official"),
    "an optimizer": lambda: registry.optimizer("sgd(momentum=0.1,momentum=0.2)"),
    "a metric": lambda: registry.metric("top_k(k=1,k=2)"),
    "an augmentation": lambda: Augment.of("crop(pad=1,pad=2)"),
    "churn": lambda: scheduled(federation(), "random:rate=0.1,rate=0.2"),
    "a setting": lambda: with_settings(Experiment(methods=("fedprox",)), ["lr=0.1", "lr=0.2"]),
    "a method's setting": lambda: with_settings(Experiment(methods=("fedprox",)), ["fedprox.mu=0.1", "fedprox.mu=0.2"]),
}


@pytest.mark.parametrize("what", TWICE)
def test_what_is_given_twice_is_refused(what):
    """The last one counted, in all of these, and nobody was told."""
    with pytest.raises(CoterieError, match=r"given twice|one preset"):
        TWICE[what]()


def test_lists_add_up(tmp_path):
    """Of `ignore=a,ignore=b` the second alone was left out; now it is `ignore=a,b`, in whatever order they stand."""
    path = tmp_path / "t.csv"
    path.write_text("a,b,c,label\n1,2,3,0\n4,5,6,1\n")
    for spelling in ("ignore=a,b", "ignore=a,ignore=b", "ignore=a,label=label,ignore=b"):
        assert load(f"{path}:{spelling}").x.tolist() == [[3], [6]], spelling
    assert load(f"{path}:x=c,x=a").x.tolist() == [[3, 1], [6, 4]]
    assert load(f"{path}:classes=1,classes=0").y.tolist() == [1, 0]  # label 0 is the second of 1, 0
    with pytest.raises(CoterieError, match=r"label is given twice in '.*', a and b; give it once"):
        load(f"{path}:label=a,label=b")
    assert with_settings(Experiment(), ["watch=f1", "watch=loss,auroc"]).training.watch == ("f1", "loss", "auroc")


def test_a_setting_of_one_method_goes_before_that_of_all_in_any_order():
    """The last one counted: `moon.mu=0.5` was lost where `mu=0.1` stood behind it."""
    both = ["mu=0.1", "moon.mu=0.5"]
    for settings in (both, both[::-1]):
        found = with_settings(Experiment(methods=("fedprox", "moon")), settings).chosen()
        assert [method.mu for method in found] == [0.1, 0.5], settings
    with pytest.raises(CoterieError, match="unknown option of moon 'mue'; did you mean 'mu'"):
        with_settings(Experiment(methods=("moon",)), ["moon.mue=1"])


def test_an_option_of_natural_that_does_not_exist_is_a_sentence(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,client,label\n1,u,0\n4,v,1\n")
    with pytest.raises(CoterieError, match="unknown option of partition 'natural' 'minimun'; did you mean 'minimum'"):
        Experiment(data=str(path), partition="natural:minimun=1").federation()
    with pytest.raises(CoterieError, match=r"clients is no option of partition 'iid'; write --clients"):
        Experiment(partition="iid:clients=4").federation()


SAID = {
    "weight_decay=1e-4": "write optimizer=sgd(weight_decay=1e-4)",
    "wd=1e-4": "write optimizer=sgd(weight_decay=1e-4)",
    "momentum=0.9": "write optimizer=sgd(momentum=0.9)",
    "nesterov=true": "write optimizer=sgd(momentum=0.9,nesterov=true)",
    "num_rounds=5": "did you mean 'rounds'?",
    "local_epochs=2": "did you mean 'epochs'?",
    "batch_size=2": "did you mean 'batch'?",
    "learning_rate=2": "did you mean 'lr'?",
    "random_state=1": "did you mean 'seed'?",
    "num_clients=7": "write --clients 7",
    "dropout=0.5": "--model mlp:dropout=0.5",
    "hidden=64": "--model mlp:hidden=64",
    "k=3": "--metric 'top_k(k=3)'",
    "dataset=x.csv": "write --data x.csv",
    "server_lr=0.1": "write server=sgd(lr=0.1)",
    "lr_decay=0.9": "write schedule=decay and decay=0.9",
    "grad_clip=1": "did you mean 'clip'?",
    "num_seeds=3": "write --seeds 3",
    "metrics=f1": "did you mean 'metric'?",
    "clients=7": "write --clients 7",
}


@pytest.mark.parametrize("setting", SAID)
def test_the_words_of_others_say_what_to_write(setting):
    with pytest.raises(CoterieError) as error:
        with_settings(Experiment(methods=("fedper",)), [setting])
    assert SAID[setting] in str(error.value)


@pytest.mark.parametrize("spelling", SAID)
def test_and_they_are_right(spelling):
    """What is advised is taken: no sentence sends people to an option that does not exist."""
    advised = SAID[spelling]
    if "optimizer=" in advised or "server=" in advised:
        with_settings(Experiment(), [advised.removeprefix("write ")])
    elif "did you mean" in advised:
        assert advised.split("'")[1] in {f.name for f in dataclasses.fields(Training)}
    elif "--model" in advised:
        assert Experiment(model=advised.removeprefix("--model ")).spec(federation()).factory()() is not None
    elif "top_k" in advised:
        registry.metric(advised.split("'")[1])


OF_THE_RUN = sorted({f.name for f in dataclasses.fields(Training)} - {f.name for f in dataclasses.fields(LocalOptions)})


@pytest.mark.parametrize("name", OF_THE_RUN)
def test_a_methods_options_send_what_all_share_to_the_run(name):
    """`fedper:metric=f1` suggested `device`, which is no option of a method either."""
    with pytest.raises(CoterieError, match="all methods of a run share it: write --") as error:
        registry.method(f"fedper:{name}=1")
    assert "did you mean" not in str(error.value)


def test_they_are_the_training_options_that_methods_do_not_have():
    assert sorted(LocalOptions.OF_THE_RUN) == OF_THE_RUN


def test_no_far_word_is_suggested():
    """Half of the letters of `metric` are in `device`: that is no resemblance."""
    said = str(unknown("option", "metric", ["device", "lr"]))
    assert "did you mean" not in said
    assert "known: device, lr" in said


def test_data_know_the_words_of_others(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,label\n1,0\n4,1\n")
    for word, meant in (("target", "label"), ("drop", "ignore"), ("sep", "separator"), ("normalize", "scale"),
                        ("patient", "group"), ("features", "x")):
        with pytest.raises(CoterieError, match=f"unknown option of table data '{word}'; did you mean '{meant}'"):
            load(f"{path}:{word}=a")
