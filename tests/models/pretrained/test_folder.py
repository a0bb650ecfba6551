"""`hf:PATH`: folders made here, against what transformers itself computes of them."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from coterie.contract.layout import Layout
from coterie.errors import CoterieError
from coterie.models import model
from coterie.models.lora import adapted, merged
from coterie.options import parse_options

transformers = pytest.importorskip("transformers", reason="pip install 'coterie[hf]'")

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
         "max_position_embeddings": 32}
TEXTS = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 0, 0, 0]])
TARGETS = {"bert": "query+value", "roberta": "query+value", "gpt2": "c_attn", "llama": "q_proj+v_proj"}


def built(kind):
    """A tiny model with random weights, as its family's class; dropout stays at the family's 0.1 where it has some."""
    torch.manual_seed(0)
    t = transformers
    if kind == "bert":
        return t.BertModel(t.BertConfig(**SIZES))
    if kind == "roberta":  # counts places from behind its padding's number, 1
        return t.RobertaModel(t.RobertaConfig(**SIZES | {"max_position_embeddings": 34}, pad_token_id=1))
    if kind == "gpt2":
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=32,
                                              bos_token_id=1, eos_token_id=2))
    return t.LlamaForCausalLM(t.LlamaConfig(**SIZES, num_key_value_heads=2))


@pytest.fixture
def folder(tmp_path):
    """Writes a tiny model; its path and the model, in evaluation mode."""
    def write(kind):
        theirs = built(kind).eval()
        theirs.save_pretrained(tmp_path / kind)
        return tmp_path / kind, theirs

    return write


def last_layer(theirs, tokens, mask):
    inner = getattr(theirs, "transformer", getattr(theirs, "model", theirs))
    return inner(tokens, attention_mask=mask).last_hidden_state


@pytest.mark.parametrize("kind", TARGETS)
def test_classification_is_the_mean_over_the_tokens_and_a_head(folder, kind):
    """What transformers gives with its usual mask, averaged by hand; a prepared mask is the same mask. Dropout is off
    in training, too, so two calls agree."""
    path, theirs = folder(kind)
    net = model(f"hf:{path}", (6,), 4)()
    there = (TEXTS > 0).long()
    padding = 1 if kind == "roberta" else 0
    with torch.no_grad():
        h = last_layer(theirs, torch.where(TEXTS > 0, TEXTS, padding), there)
        mean = (h * there[..., None]).sum(1) / there.sum(1, keepdim=True)
        assert net.training
        torch.testing.assert_close(net(TEXTS), net.head(mean), rtol=1e-5, atol=1e-6)
    assert net.prepared


@pytest.mark.parametrize("kind", TARGETS)
def test_numbers_that_were_moved_are_moved_back(folder, kind):
    """Where a tokenizer's number 0 is a word, texts come with all numbers one higher, as 0 is padding: the model must
    look up what the tokenizer meant. Every word would be its neighbour else, without an error."""
    path, _ = folder(kind)
    torch.manual_seed(0)
    plain, moved = (model(f"hf:{path}", (6,), 4, shift=shift)() for shift in (0, 1))
    moved.load_state_dict(plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(moved(torch.where(TEXTS > 0, TEXTS + 1, 0)), plain(TEXTS))
        first = torch.tensor([[1, 5, 6]])  # the model's own word 0 begins this text
        assert not torch.equal(moved(first), moved(torch.tensor([[2, 5, 6]])))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_moved_numbers_of_the_next_token_and_a_model_with_more_words_than_its_tokenizer(folder, kind):
    """51 outputs for 50 words, the first being padding, which is never next; 48 for a tokenizer of 47 words."""
    path, theirs = folder(kind)
    moved = torch.where(TEXTS > 0, TEXTS + 1, 0)
    with torch.no_grad():
        expected = theirs(TEXTS, attention_mask=(TEXTS > 0).long()).logits[TEXTS > 0]
        for words in (50, 47):
            found = model(f"hf:{path}", (6,), words + 1, shift=1, speaks=True)()(moved)
            assert found.shape == (2, 6, words + 1)
            torch.testing.assert_close(found[TEXTS > 0][:, 1:], expected[:, :words], rtol=1e-5, atol=1e-6)
            assert (found.softmax(-1)[..., 0] == 0).all()
    with pytest.raises(CoterieError, match=r"the tokenizer has 60 words and the model in .* 50"):
        model(f"hf:{path}", (6,), 61, shift=1, speaks=True)


def test_a_model_that_looks_ahead_predicts_no_next_token(folder):
    with pytest.raises(CoterieError, match="sees the tokens behind each one, so it cannot predict the next"):
        model(f"hf:{folder('bert')[0]}", (6,), 50, speaks=True)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_as_many_outputs_as_words_are_the_next_tokens_scores(folder, kind):
    path, theirs = folder(kind)
    net = model(f"hf:{path}", (6,), 50)()
    with torch.no_grad():
        expected = theirs(TEXTS, attention_mask=(TEXTS > 0).long()).logits
        torch.testing.assert_close(net(TEXTS)[TEXTS > 0], expected[TEXTS > 0], rtol=1e-5, atol=1e-6)
    assert net(TEXTS).shape == (2, 6, 50)
    assert Layout.of(net).head == "base.lm_head"


@pytest.mark.parametrize("outputs", [4, 50])
@pytest.mark.parametrize("kind", TARGETS)
def test_clients_are_stacked(folder, kind, outputs):
    """Under `vmap` each of two clients has the gradient that it has alone."""
    path, _ = folder(kind)
    net = adapted(model(f"hf:{path}", (6,), outputs), f"lora:rank=2,targets={TARGETS[kind]}")()
    layout = Layout.of(net)
    rows = torch.stack([layout.row(net), layout.row(net) + 0.1])
    texts = torch.stack([TEXTS, TEXTS.flip(0)])

    def loss(row, x):
        return functional_call(net, layout.views(row), (x,)).square().mean()

    both = vmap(grad(loss))(rows, texts)
    for k in range(2):
        torch.testing.assert_close(both[k], grad(loss)(rows[k], texts[k]), rtol=1e-4, atol=1e-6)
    assert len(layout.pairs) == 2 * len(TARGETS[kind].split("+"))


def test_gpt2s_turned_layers_are_adapted_right(folder):
    """Its weights lie on their side, [inputs, outputs]. W + s B A by hand, put into transformers' own model where they
    are [inputs, outputs] again, gives the adapted model's outputs; c_attn is 48 x 16, so a wrong side would not fit."""
    path, theirs = folder("gpt2")
    net = adapted(model(f"hf:{path}", (6,), 50), "lora:rank=2,alpha=3,targets=c_attn")()
    with torch.no_grad():
        for name, sub in net.named_modules():
            if name.endswith("c_attn"):
                sub.lora.B.normal_()
                turned = theirs.get_submodule(name.removeprefix("base."))
                assert turned.weight.shape == (16, 48)
                turned.weight += (1.5 * sub.lora.B @ sub.lora.A).T
        torch.testing.assert_close(net(TEXTS[:1]), theirs(TEXTS[:1]).logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(merged(net)(TEXTS), net(TEXTS), rtol=1e-4, atol=1e-5)


def test_a_run_over_a_folder(folder, tiny):
    """Stack and loop give the same rows, dropout of the adapters included, and the backbone does not move."""
    path, _ = folder("bert")
    states = []
    for engine in ("stack", "loop"):
        build = adapted(model(f"hf:{path}", (6,), 3), "lora:rank=2,targets=query+value,dropout=0.1")
        sim = tiny.simulation("fedavg", build, data=tiny.federation(kind="words"), engine=engine)
        before = [value.clone() for value in sim.layout.values]
        sim.round()
        assert all(torch.equal(a, b) for a, b in zip(before, sim.layout.values, strict=True))
        states.append(tiny.state(sim))
    tiny.close(*states, 1e-9)


def test_only_its_own_weights_and_no_code(folder, tmp_path, monkeypatch):
    path, _ = folder("bert")
    said = json.loads((path / "config.json").read_text())

    def changed(name, **values):
        other = tmp_path / name
        other.mkdir()
        (other / "config.json").write_text(json.dumps({**said, **values}))
        (other / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
        return f"hf:{other}"

    (tmp_path / "evil").mkdir()
    with pytest.raises(CoterieError, match="needs code of its own"):
        model(changed("own", auto_map={"AutoModel": "mine.Mine"}), (6,), 3)
    with pytest.raises(CoterieError, match="is quantised"):
        model(changed("quantised", quantization_config={"bits": 4}), (6,), 3)
    with pytest.raises(CoterieError, match="cannot be read"):
        model(changed("unknown", model_type="no such model"), (6,), 3)
    with pytest.raises(CoterieError, match=r"lack .*layer\.2"):
        model(changed("short", num_hidden_layers=3), (6,), 3)()
    with pytest.raises(CoterieError, match="cannot be read"):
        model(changed("other", hidden_size=20), (6,), 3)()
    (tmp_path / "t5").mkdir()
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    (tmp_path / "t5" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CoterieError, match="is a t5; encoders of text"):
        model(f"hf:{tmp_path / 't5'}", (6,), 3)
    with pytest.raises(CoterieError, match=r"no config\.json in it"):
        model(f"hf:{tmp_path / 'evil'}", (6,), 3)
    with pytest.raises(CoterieError, match="texts of 32 tokens at most, and these have 33"):
        model(f"hf:{path}", (33,), 3)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CoterieError, match=r"holds no \.safetensors, only config.json, pytorch_model.bin"):
        model(f"hf:{path}", (6,), 3)
    (path / "pytorch_model.bin").write_bytes(b"no tensors")
    (path / "pytorch_model.bin").rename(path / "model.safetensors")
    with pytest.raises(CoterieError, match="cannot be read"):
        model(f"hf:{path}", (6,), 3)()
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(CoterieError, match="holds an adapter"):
        model(f"hf:{path}", (6,), 3)
    (path / "adapter_config.json").unlink()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CoterieError, match=r"pip install 'coterie\[hf\]'"):
        model(f"hf:{path}", (6,), 3)


def test_roberta_reads_as_many_tokens_as_it_has_places_behind_its_padding(folder):
    path, _ = folder("roberta")
    assert isinstance(model(f"hf:{path}", (32,), 3)(), nn.Module)
    with pytest.raises(CoterieError, match="texts of 32 tokens"):
        model(f"hf:{path}", (33,), 3)()


def test_how_a_folder_is_spelled():
    assert parse_options("hf:a/b") == ("hf:a/b", {})
    assert parse_options("hf:a/b:x=1") == ("hf:a/b", {"x": 1})


def test_tokens_that_the_model_was_never_taught(folder, tiny):
    """Another tokenizer's numbers would stop a run in its middle, or mean other words; 50 is the first one unknown."""
    path, _ = folder("bert")
    data = tiny.federation(kind="words")
    data.x[0, 0] = 49
    tiny.simulation("fedavg", model(f"hf:{path}", (6,), 3), data=data)
    data.x[0, 0] = 50
    with pytest.raises(CoterieError, match="token number 50, and the model knows 50 of them"):
        tiny.simulation("fedavg", model(f"hf:{path}", (6,), 3), data=data)
    with pytest.raises(CoterieError, match="reads texts as token numbers"):
        tiny.simulation("fedavg", model(f"hf:{path}", (4,), 3))
