"""Next tokens of a small table of texts, from the command line to the report; and what is not possible with them."""

import json

import numpy as np
import pytest
import torch
from commands import coterie
from word_pieces import tokenizer

from coterie.data import load
from coterie.running.experiment import Experiment

TEXTS = {
    "anna": ["the cat sat on the mat and ran away", "the dog sat on the log and ran away", "a cat is not a dog"],
    "bert": ["to be or not to be that is it", "whether it is nobler in the mind", "to die to sleep no more"],
    "carl": ["one two three four five six", "two three four five six one", "three four five six one two"],
}
DATA = "plays.csv:x=text,client=role,task=next,tokenizer=characters,words=128,length=16"
MODEL = "causal:width=8,layers=1,heads=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("texts")
    lines = [f"{role},{text}" for role, texts in TEXTS.items() for text in texts * 2]
    (place / "plays.csv").write_text("\n".join(["role,text", *lines]) + "\n")
    made = coterie(
        "compare", "fedavg", "fedper", "--data", DATA, "--model", MODEL, "--adapter", "lora:rank=2,targets=q+v",
        "--rounds", "2", "--watch", "perplexity", "bits", "--out", "run", "--set", "device=cpu", cwd=place,
    )
    assert made.returncode == 0, made.stderr
    assert "perplexity" in made.stdout
    return place, made


def test_a_run_says_what_is_predicted_and_keeps_scores_per_token(folder):
    place, made = folder
    assert "next token of a vocabulary of 128" in made.stderr + made.stdout
    data = next((place / "run").rglob("data.json"))
    held = json.loads(data.read_text())
    options = {"x": "text", "client": "role", "tokenizer": "characters", "words": 128, "length": 16}
    texts = load(place / "plays.csv", task="next", **options)
    assert np.sum(held["histogram"]) == sum(len(t) - 1 for each in TEXTS.values() for t in each * 2)
    assert np.sum(held["histogram"]) == int((texts.y >= 0).sum())


def test_the_run_is_reported(folder):
    place, _ = folder
    found = coterie("report", "run", cwd=place)
    assert found.returncode == 0, found.stderr


def test_a_newcomer_is_refused_in_a_sentence(folder):
    place, _ = folder
    run = next((place / "run").rglob("config.json")).parent
    found = coterie("personalize", str(run), "--data", "plays.csv", "--client", "anna", "--out", "me.safetensors",
                    cwd=place)
    assert found.returncode != 0
    assert "keep newcomers among the data of the run as unseen clients" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_clients_model_is_exported_and_answers_every_token(folder):
    place, _ = folder
    run = next(path.parent for path in (place / "run").rglob("config.json") if "fedper" in str(path))
    found = coterie("export", str(run), "--client", "anna", "--out", "anna.safetensors", cwd=place)
    assert found.returncode == 0, found.stderr
    assert (place / "anna.safetensors").stat().st_size > 0


def test_a_model_with_fewer_places_than_the_texts_have_is_refused_before_anything_is_trained(folder):
    place, _ = folder
    found = coterie("run", "fedavg", "--data", DATA, "--model", f"{MODEL},length=8", "--rounds", "1", cwd=place)
    assert found.returncode != 0
    assert "texts of at most length=8 tokens, and those of the data have 16" in found.stderr


def test_a_model_that_answers_once_a_text_is_refused(folder):
    place, _ = folder
    found = coterie("run", "fedavg", "--data", DATA, "--model", "fasttext:features=8", "--rounds", "1", cwd=place)
    assert found.returncode != 0
    assert "128 classes a token" in found.stderr


def test_a_partition_by_labels_is_refused(folder):
    place, _ = folder
    found = coterie("run", "fedavg", "--data", DATA, "--model", MODEL, "--partition", "dirichlet:alpha=1", cwd=place)
    assert found.returncode != 0
    assert "one whole-number label per sample" in found.stderr


def test_a_folders_model_is_asked_by_its_own_numbers(tmp_path):
    """The tokenizer's number 0 is a word, so texts come one higher; scores of the next token are those that
    transformers gives for the tokenizer's own numbers, and a run over the folder is trained."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    words = ["[CLS]", "[SEP]", "[UNK]", "play", "##ing", "chess", "we", "like", "##s"]
    config = transformers.GPT2Config(vocab_size=12, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0,
                                     eos_token_id=1)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "tiny")
    file = tokenizer(tmp_path / "tiny" / "tokenizer.json", words)
    lines = [f"{role},we like playing chess" + " we" * k for k in range(4) for role in "abcd"]
    (tmp_path / "said.csv").write_text("\n".join(["role,text", *lines]) + "\n")
    data = f"said.csv:x=text,client=role,task=next,tokenizer={file.parent},length=9"
    experiment = Experiment(data=data.replace("said.csv", str(tmp_path / "said.csv")), model=f"hf:{tmp_path / 'tiny'}")
    federation = experiment.federation()
    own = torch.tensor([[0, 6, 7, 3, 4, 5]])  # [CLS] we like play ##ing chess
    x = federation.x[(federation.x[:, 6:] == 2).any(1)][:1].long()
    assert x[0, :6].tolist() == [1, 7, 8, 4, 5, 6]
    with torch.no_grad():
        expected = theirs(own).logits[0]
        found = experiment.spec(federation).factory()().eval()(x)[0, :6, 1:]
    assert found.shape == (6, len(words))
    torch.testing.assert_close(found, expected[:, : len(words)], rtol=1e-5, atol=1e-6)
    done = coterie("run", "fedavg", "--data", data, "--model", "hf:tiny", "--adapter", "lora:rank=2,targets=c_attn",
                   "--rounds", "1", "--out", "run", "--set", "device=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
