"""`hf:PATH`: a model in a local folder of Hugging Face's format, built by transformers; nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie import files
from coterie.contract.layout import declare_head
from coterie.errors import CoterieError
from coterie.models.pretrained.packages import weightless

INSTALL = "pip install 'coterie[hf]'"
NEVER = -1e4
"""The score of padding as the next token, which no text has."""
TRIED = 4
"""Tokens of the text on which the prepared mask is tried."""


class HuggingFace(nn.Module):
    """Token numbers `[B, L]`, 0 for padding at the end of a text -> scores.

    Where the next token is to be predicted (`speaks`; where that is not said, where the outputs are as many as the
    words) they are the model's own, `[B, L, outputs]`; else the last layer's outputs are averaged over the tokens that
    are no padding, and a fresh linear layer is the head. Dropout of the model's own is off. Numbers of texts are
    `shift` more than the model's, where its own number 0 is a word.
    """

    def __init__(self, path: str, inputs: int, outputs: int, shift: int = 0, speaks: bool | None = None) -> None:
        super().__init__()
        config = _config(Path(path))
        self.causal, self.shift, self.outputs = _predicts_next(config, path), shift, outputs
        self.vocabulary = int(config.vocab_size) + shift
        self.speaks = self.causal and outputs == self.vocabulary if speaks is None else speaks
        if self.speaks and not self.causal:
            raise CoterieError(f"the model in {path} sees the tokens behind each one, so it cannot predict the next; "
                               "take a causal model.")
        if self.speaks and outputs > self.vocabulary:
            raise CoterieError(f"the tokenizer has {outputs - shift} words and the model in {path} "
                               f"{self.vocabulary - shift}; take the tokenizer that came with it.")
        self.padding = int(config.pad_token_id or 0)
        self.base = _built(Path(path), config, self.speaks)
        longest = _longest(self.base, config)
        if inputs > longest:
            raise CoterieError(f"the model in {path} reads texts of {longest} tokens at most, and these have {inputs}; "
                               f"cut them with length={longest} or less.")
        if self.speaks:
            _own_head(self)
        else:
            self.head = nn.Linear(int(config.hidden_size), outputs)
        self.prepared = weightless() or self._takes_prepared_masks()

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        there = x.flip(1).cumsum(1).flip(1) > 0  # [B, L]; a 0 inside a text may be a word
        own = (x - self.shift).clamp(min=0) if self.shift else x
        tokens = own if self.causal else torch.where(there, own, self.padding)
        out = self.base(input_ids=tokens, attention_mask=self._mask(there, self.prepared))
        if self.speaks:
            scores: Tensor = out.logits[..., : self.outputs - self.shift]
            return nn.functional.pad(scores, (self.shift, 0), value=NEVER) if self.shift else scores
        weight = there[..., None].to(self.head.weight.dtype)
        mean = (out.last_hidden_state.to(weight.dtype) * weight).sum(1) / weight.sum(1).clamp(min=1)
        scores = self.head(mean)
        return scores

    def _mask(self, there: Tensor, prepared: bool) -> Tensor:
        """What attention must not see.

        Prepared, it is `[B, 1, L, L]`, added to the scores: the model then looks at no values on the host, which
        `vmap` could not. To one that looks back only, the padding behind a text makes no difference.
        """
        length = there.shape[1]
        if not prepared:
            return torch.ones_like(there, dtype=torch.int64) if self.causal else there.to(torch.int64)
        dtype = self.base.get_input_embeddings().weight.dtype  # type: ignore[operator]
        if self.causal:
            seen = torch.ones(length, length, dtype=torch.bool, device=there.device).tril()[None, None]
        else:
            seen = there[:, None, None, :].expand(-1, 1, length, -1)
        return torch.zeros((), dtype=dtype, device=there.device).masked_fill(~seen, torch.finfo(dtype).min)

    def _takes_prepared_masks(self) -> bool:
        """Whether the model gives the same with the prepared mask as with the usual one."""
        x = torch.arange(1, TRIED + 1)[None].repeat(2, 1)
        x[1, TRIED // 2 :] = 0
        there = x > 0
        tokens = torch.where(there, x, self.padding)
        training = self.base.training
        self.base.eval()
        try:
            with torch.no_grad():
                masks = (self._mask(there, way) for way in (True, False))
                one, two = (self.base(input_ids=tokens, attention_mask=mask)[0] for mask in masks)
            return bool(torch.allclose(one[there], two[there], rtol=1e-4, atol=1e-4))
        except Exception:  # versions and models that want the usual mask say so in their own ways
            return False
        finally:
            self.base.train(training)

    def published(self, name: str) -> str | None:
        """A layer's name in the model as others load it; None for what is not part of it, a fresh head."""
        return name.removeprefix("base.") if name.startswith("base.") else None


def _config(path: Path) -> Any:
    """The folder's configuration; what would run code, or is no whole model, is refused."""
    if not (path / "config.json").is_file():
        raise CoterieError(f"{path} holds no model of Hugging Face: there is no config.json in it.")
    said = files.read_json(path / "config.json")
    if "auto_map" in said:
        raise CoterieError(f"the model in {path} needs code of its own (auto_map in its config.json), which is not "
                           "run; models that transformers builds itself can be used.")
    if "quantization_config" in said:
        raise CoterieError(f"the model in {path} is quantised, which is not read; save it as it was before that.")
    if (path / "adapter_config.json").exists():
        raise CoterieError(f"{path} holds an adapter (adapter_config.json), no whole model; name the folder of its "
                           "backbone.")
    if not any(path.glob("*.safetensors")):
        held = ", ".join(sorted(p.name for p in path.iterdir())[:9])
        raise CoterieError(f"{path} holds no .safetensors, only {held}; write the model anew with "
                           "model.save_pretrained(...), which makes one.")
    with _told(path):
        config = _transformers().AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    for name, value in vars(config).items():
        if ("drop" in name) and isinstance(value, int | float):  # attention_dropout, resid_pdrop, layerdrop, ...
            setattr(config, name, 0.0)
    config.use_cache = False
    return config


def _predicts_next(config: Any, path: str) -> bool:
    """Whether each token sees only those before it."""
    known, name = _transformers("models.auto.modeling_auto"), config.model_type
    masked, causal = name in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES, name in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.is_encoder_decoder or not (masked or causal):
        raise CoterieError(f"the model in {path} is a {name}; encoders of text and models that predict the next token "
                           "can be used.")
    return causal and (not masked or bool(getattr(config, "is_decoder", False)))


def _built(path: Path, config: Any, speaks: bool) -> nn.Module:
    """The model with the folder's weights; on the meta device, without."""
    kind = _transformers().AutoModelForCausalLM if speaks else _transformers().AutoModel
    with _told(path):
        if weightless():
            model: nn.Module = kind.from_config(config, trust_remote_code=False, attn_implementation="eager")
            lacking: set[str] = set()
        else:
            model, found = kind.from_pretrained(
                str(path), config=config, local_files_only=True, trust_remote_code=False, use_safetensors=True,
                attn_implementation="eager", output_loading_info=True,
            )
            lacking = set(found["missing_keys"])
    if getattr(model, "pooler", None) is not None:
        setattr(model, "pooler", None)  # noqa: B010  # a layer that nothing here asks for
    if lacking := {name for name in lacking if not name.startswith("pooler.")}:
        raise CoterieError(f"the weights in {path} lack {', '.join(sorted(lacking)[:3])} of what its config.json says "
                           "the model has.")
    return _with_linear_layers(model.to(torch.float32)).train()


def _with_linear_layers(model: nn.Module) -> nn.Module:
    """GPT-2's own linear layers, whose weights lie on their side `[inputs, outputs]`, as PyTorch's."""
    turned = _transformers("pytorch_utils").Conv1D
    for sub in list(model.modules()):
        for name, child in sub._modules.items():
            if type(child) is turned:
                found = dict(sub.get_submodule(name).named_parameters())  # weight and bias
                inputs, outputs = found["weight"].shape
                with torch.device("meta"):
                    layer = nn.Linear(inputs, outputs)
                layer.weight, layer.bias = nn.Parameter(found["weight"].detach().T.contiguous()), found["bias"]
                setattr(sub, name, layer)
    return model


def _longest(model: nn.Module, config: Any) -> int:
    """The most tokens that it reads; some count their places from behind the padding's number."""
    longest = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
    for name, sub in model.named_modules():
        if name.endswith("position_embeddings") and getattr(sub, "padding_idx", None) is not None:
            return longest - int(sub.padding_idx) - 1
    return longest


def _own_head(module: HuggingFace) -> None:
    """The layer that makes the model's own scores is the head."""
    wanted = module.base.get_output_embeddings()  # type: ignore[operator]
    names = [name for name, sub in module.named_modules() if sub is wanted]
    declare_head(module, names[0])


def _transformers(module: str = "") -> Any:
    """The library, or a module of it, which only these models need."""
    try:
        return importlib.import_module(f"transformers.{module}" if module else "transformers")
    except ImportError as reason:
        raise CoterieError(f"models of Hugging Face's folders need transformers: {INSTALL}") from reason


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Without what transformers prints; what it cannot read becomes a sentence."""
    logging = _transformers("utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except CoterieError:
        raise
    except Exception as reason:
        said = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
        raise CoterieError(f"the model in {path} cannot be read: {said}") from reason
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
