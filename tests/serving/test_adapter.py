"""Adapters handed on: alone in PEFT's format, read by PEFT itself, and merged into the backbone."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from commands import exit_code
from safetensors.torch import load_file
from torch import nn

from coterie.contract.layout import Layout
from coterie.errors import CoterieError
from coterie.models import model
from coterie.models.lora import adapted
from coterie.models.pretrained import bert, packages
from coterie.running.saved import Saved
from coterie.serving import adapter
from coterie.serving.portable import Portable, of_run, read_model

LAYERS = '''
from torch import nn

class Net(nn.Module):
    """Layers that are not square, convolutions, and one whose name ends another's: `0` and `body.0`."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.add_module("0", nn.Conv2d(shape[0], 3, 3, stride=2, padding=1))
        self.body = nn.Sequential(nn.Linear(48, 7), nn.ReLU(), nn.Linear(7, 5), nn.LayerNorm(5))
        self.head = nn.Linear(5, outputs)

    def forward(self, x):
        return self.head(self.body(self.get_submodule("0")(x).flatten(1)))
'''


def portable(build, adapter_spelling, spelling, shape, outputs, x):
    """A model with every number of its row moved, as training leaves it: B is no longer 0."""
    torch.manual_seed(0)
    module = adapted(build, adapter_spelling)()
    layout = Layout.of(module)
    row = layout.row(module)
    row = row + 0.3 * torch.randn(row.shape, generator=torch.Generator().manual_seed(1))
    job = {"method": "fedavg", "model": spelling, "adapter": adapter_spelling, "shape": list(shape), "classes": outputs,
           "outputs": outputs, "training": {}}
    return Portable(row, layout, module, outputs, {"job": job}, x)


def run(place, monkeypatch, *words):
    monkeypatch.chdir(place)
    assert exit_code(monkeypatch, *words) == 0


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Four clients that keep their B and their head (FedSA-LoRA), with unequal ranks, over a user's own module."""
    place = tmp_path_factory.mktemp("adapter")
    patch = pytest.MonkeyPatch()
    (place / "layers.py").write_text(LAYERS)
    run(place, patch, "run", "fedper:fedsa", "--clients", 4, "--model", "layers.py:Net", "--rounds", 2, "--adapter",
        "lora:rank=2,alpha=3,targets=0+body.0(rank=3)+body.2", "--set", "device=cpu", "--out", "run")
    patch.undo()
    return place


def peft_of(net, folder):
    return pytest.importorskip("peft").PeftModel.from_pretrained(net, str(folder)).eval()


def test_peft_reads_a_clients_adapter(ran, monkeypatch, capsys):
    """Over the backbone of the run, with another head: PEFT puts A, B, their unequal scales 3/2 and 3/3 and the head of
    the client in, and gives the client's outputs."""
    monkeypatch.chdir(ran)
    assert exit_code(monkeypatch, "export", "run", "--client", "2", "--format", "peft", "-o", "two") == 0
    assert "same outputs" in capsys.readouterr().out
    config = json.loads((ran / "two" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    assert config["rank_pattern"] == {r"^body\.0": 3}
    assert config["alpha_pattern"] == {}  # alpha / rank is the scale of both libraries
    assert re.fullmatch(config["target_modules"], "body.0")
    assert not re.fullmatch(config["target_modules"], "0.0")
    held = load_file(ran / "two" / "adapter_model.safetensors")
    factors = 2 * (1 * 9 + 3) + 3 * (48 + 7) + 2 * (7 + 5)
    assert sum(t.numel() for t in held.values()) == factors + 5 * 10 + 10
    sim = Saved.open(ran / "run").simulation()
    x = sim.federation.client(2, "test")[0]
    client = sim.layout.load(sim.init.module, sim.row(2)).eval()
    backbone = model("layers.py:Net", (1, 8, 8), 10)()
    frozen = dict(zip((e.name for e in sim.layout.frozen), sim.layout.values, strict=True))
    backbone.load_state_dict({name.replace(".base.", "."): t for name, t in frozen.items()}, strict=False)
    read = peft_of(backbone, ran / "two")
    with torch.no_grad():
        torch.testing.assert_close(read(x), client(x), rtol=1e-6, atol=1e-6)
        other = sim.layout.load(sim.init.module, sim.row(1)).eval()
        assert (read(x) - other(x)).abs().max() > 1e-3


def test_merged_layers_are_plain(ran, monkeypatch, capsys):
    """The file has the names of the module as the user wrote it, loads into it, and is a model of coterie's as well."""
    monkeypatch.chdir(ran)
    words = ["export", "run", "--client", "2", "--merged", "-o", "merged.safetensors"]
    assert exit_code(monkeypatch, *words) == 0, capsys.readouterr()
    net = model("layers.py:Net", (1, 8, 8), 10)()
    held = load_file(ran / "merged.safetensors")
    assert set(held) == set(net.state_dict())
    net.load_state_dict(held)
    sim = Saved.open(ran / "run").simulation()
    x = sim.federation.client(2, "test")[0]
    expected = sim.layout.load(sim.init.module, sim.row(2)).eval()
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x), expected(x), rtol=1e-5, atol=1e-5)
        again = read_model(ran / "merged.safetensors")
        torch.testing.assert_close(again.outputs(x), expected(x), rtol=1e-5, atol=1e-5)
    assert exit_code(monkeypatch, "export", "run", "--client", "2", "--merged", "-o", "merged.pt") == 0
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.load("merged.pt")(x), expected(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("words", "sentence"), [
    (["--merged", "--format", "peft"], "give one of the two"),
    (["--format", "peft", "-o", "taken"], "is there already"),
])
def test_what_does_not_go_together(ran, words, sentence, monkeypatch, capsys):
    monkeypatch.chdir(ran)
    (ran / "taken").mkdir(exist_ok=True)
    out = [] if "-o" in words else ["-o", "new"]
    assert exit_code(monkeypatch, "export", "run", "--client", "2", *words, *out) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (ran / "new").exists()


def test_what_is_no_adapter_is_refused(tmp_path):
    """No adapters; and with them a normalisation or the whole backbone that trained, which PEFT's format cannot say."""
    build, x = model("mlp", (4,), 3), torch.randn(5, 4)
    plain = portable(build, "", "mlp", (4,), 3, x)
    with pytest.raises(CoterieError, match="has no adapters, so there is nothing"):
        adapter.export_peft(plain, tmp_path / "a")
    with pytest.raises(CoterieError, match="no adapters to merge"):
        adapter.merged(plain)
    moved = portable(build, "lora:rank=2,base=trains", "mlp", (4,), 3, x)
    with pytest.raises(CoterieError, match="trained as well, and PEFT's format holds"):
        adapter.export_peft(moved, tmp_path / "a")
    assert not list(tmp_path.iterdir())
    merged = adapter.merged(moved)  # which holds all of it
    torch.testing.assert_close(merged.outputs(x), moved.outputs(x), rtol=1e-5, atol=1e-5)


def test_an_embedding_and_a_stored_backbone(tmp_path):
    """An embedding's factors have names of their own in PEFT; merged into a backbone that is stored in bfloat16, what
    an adapter adds is not rounded."""
    x = torch.randint(1, 20, (5, 8), generator=torch.Generator().manual_seed(0))
    build = model("fasttext", (8,), 3, features=6, vocabulary=20)
    spelling = "fasttext:features=6,vocabulary=20"
    mine = portable(build, "lora:rank=2,targets=embedding+base.1,backbone=bfloat16", spelling, (8,), 3, x)
    adapter.export_peft(mine, tmp_path / "peft")
    held = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert "base_model.model.base.0.embedding.lora_embedding_A" in held
    backbone = build()
    frozen = dict(zip((e.name for e in mine.layout.frozen), mine.layout.values, strict=True))
    backbone.load_state_dict({n.replace("embedding.base.", "embedding.").replace("base.1.base", "base.1"): t.float()
                              for n, t in frozen.items()}, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(peft_of(backbone, tmp_path / "peft")(x), mine.outputs(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(adapter.merged(mine).outputs(x), mine.outputs(x), rtol=1e-5, atol=1e-5)


SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 24, "max_position_embeddings": 32}
TEXTS = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]])


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_a_folders_adapter_goes_on_the_same_folder(kind, tmp_path):
    """PEFT puts it on what transformers makes of the folder: the names are transformers' own. An encoder's head lies
    beside, for the mean over the tokens; a causal model's own head, where it is no table of words, is among them."""
    t = pytest.importorskip("transformers", reason="pip install 'coterie[hf]'")
    torch.manual_seed(0)
    base = {
        "bert": lambda: t.BertModel(t.BertConfig(**SIZES)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=32,
                                                       bos_token_id=1, eos_token_id=2)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, num_key_value_heads=2)),
    }[kind]()
    base.save_pretrained(tmp_path / kind)
    targets = {"bert": "query+value(rank=3)", "gpt2": "c_attn+c_fc", "llama": "q_proj+v_proj(rank=3)"}[kind]
    outputs = 4 if kind == "bert" else 50
    spelling = f"hf:{tmp_path / kind}"
    mine = portable(model(spelling, (6,), outputs), f"lora:rank=2,targets={targets}", spelling, (6,), outputs, TEXTS)
    said = adapter.export_peft(mine, tmp_path / "peft")
    loaded = (t.AutoModel if kind == "bert" else t.AutoModelForCausalLM).from_pretrained(tmp_path / kind)
    read = peft_of(loaded, tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    with torch.no_grad():
        if kind == "bert":
            head = nn.Linear(16, 4)
            head.load_state_dict(load_file(tmp_path / "peft" / "head.safetensors"))
            found = head(read(TEXTS).last_hidden_state.mean(1))
            assert "head.safetensors" in said
        else:
            found = read(TEXTS).logits
            assert config["modules_to_save"] == (["lm_head"] if kind == "llama" else None)
        torch.testing.assert_close(found, mine.outputs(TEXTS), rtol=1e-5, atol=1e-5)
    assert config["base_model_name_or_path"] == str(tmp_path / kind)


def test_minilms_adapter_goes_on_transformers_bert(tmp_path, monkeypatch):
    """Its layers have other names here; in the file they are called as in the published model."""
    t = pytest.importorskip("transformers", reason="pip install 'coterie[hf]'")
    torch.manual_seed(0)
    sizes = {"width": 16, "heads": 4, "inner": 24, "layers": 2, "longest": 32, "vocabulary": 50}
    theirs = t.BertModel(t.BertConfig(**SIZES)).eval()
    theirs.save_pretrained(tmp_path / "bert")
    monkeypatch.setattr(bert.MiniLM, "architecture", staticmethod(lambda: bert.Bert(**sizes)))
    monkeypatch.setattr(packages, "found", lambda wanted, what: tmp_path / "bert" / "model.safetensors")
    mine = portable(model("minilm", (6,), 4), "lora:rank=2,targets=q+v(rank=3)+up", "minilm", (6,), 4, TEXTS)
    adapter.export_peft(mine, tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert "encoder.layer.0.attention.self.query" in config["target_modules"]
    head = nn.Linear(16, 4)
    head.load_state_dict(load_file(tmp_path / "peft" / "head.safetensors"))
    with torch.no_grad():
        found = head(peft_of(theirs, tmp_path / "peft")(TEXTS).last_hidden_state.mean(1))
        torch.testing.assert_close(found, mine.outputs(TEXTS), rtol=1e-5, atol=1e-5)


def test_the_facts_beside_an_adapter(tmp_path, monkeypatch):
    """Of a number to predict: how an answer is made of an output."""
    rng = np.random.default_rng(0)
    drawn = enumerate(rng.normal(size=(60, 2)))
    rows = [f"{a:.3f},{b:.3f},{'nsw'[k % 3]},{100 + 30 * a:.2f}" for k, (a, b) in drawn]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,site,y", *rows]) + "\n")
    run(tmp_path, monkeypatch, "run", "fedavg", "--data", "t.csv:label=y,client=site,scale=true", "--model",
        "mlp:hidden=6", "--adapter", "lora:rank=2", "--rounds", 1, "--set", "device=cpu", "--out", "run")
    mine = of_run(Saved.open(tmp_path / "run"), None, 0, False)
    said = adapter.export_peft(mine, tmp_path / "peft")
    facts = json.loads((tmp_path / "peft" / "coterie.json").read_text())
    assert facts["target"]["answer"] == "mean + deviation * output"
    assert "an answer is" in said
