"""Models that somebody trained already, and a fresh head on each; see docs/models.md."""

from __future__ import annotations

from torch import nn

from coterie.models.pretrained.bert import MiniLM
from coterie.models.pretrained.mobile import EfficientNetLite0, EfficientNetLite1, EfficientNetLite2, MobileNetV2
from coterie.models.pretrained.packages import tokenizer_file

__all__ = ["PRETRAINED", "tokenizer_file"]

PRETRAINED: dict[str, type[nn.Module]] = {
    "minilm": MiniLM, "mobilenetv2": MobileNetV2, "efficientnet-lite0": EfficientNetLite0,
    "efficientnet-lite1": EfficientNetLite1, "efficientnet-lite2": EfficientNetLite2,
}
"""Models whose weights come in a package of the index."""
