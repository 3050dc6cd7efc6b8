"""Models with recurrent layers, and sizes of their states."""

from dataclasses import replace
from typing import Any

from metal_prefill import Model
from metal_prefill.synth import ScanShape
from support.small_models import MODELS

ARCHITECTURES = ("lfm2", "mamba2", "falcon-h1", "qwen35")  # one with each kind of state and of layer
NAMES = (
    *("lfm2", "lfm2, attention last", "lfm2, four taps, odd dimensions"),
    *("mamba2", "mamba2, three groups, odd dimensions"),
    *("granitehybrid", "granitehybrid, attention last"),
    *("falcon-h1", "falcon-h1, norms in groups"),
    *("qwen35", "qwen35, recurrence last", "qwen35, odd dimensions"),
)
PAGEWISE = ("lfm2", "qwen35")  # states take at most the memory of a page, so that each has a snapshot
# States that take the memory of several pages and are not written after drafts: 1,100 tokens of 64 channels,
# or four matrices of 128 by 128.
_FEW: dict[str, Any] = {"dim": 64, "ffn": 64, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 64}
_SCAN = ScanShape(inner=512, state=128, heads=4, groups=2, layers=(0,))
LARGE = {
    "lfm2": replace(MODELS["lfm2"], **_FEW, conv_layers=(0,), conv_taps=1101),
    "qwen35": replace(MODELS["qwen35"], **_FEW, scan=_SCAN),
}


def page_bytes(model: Model) -> int:
    """Return the bytes of K and V in f16 of 64 positions, in the layers with attention."""
    c = model.config
    attend = sum("attention" in c.kind(layer) for layer in range(c.n_layers))
    return attend * 64 * c.n_kv_heads * (c.key_dim + c.value_dim) * 2


def state_bytes(model: Model) -> int:
    """Return the bytes of the states of all layers in float32."""
    config = model.config
    return sum(4 * config.state_values(layer) for layer in range(config.n_layers))


def interval(model: Model) -> int:
    """Return the positions between snapshots: whole pages of as much memory, or 16 pages without K and V.

    A session without states continues from any position.
    """
    page, states = page_bytes(model), state_bytes(model)
    if not states:
        return 1
    return 64 * (-(-states // page) if page else 16)
