"""Models of a few small layers, for tests that open or run them very often, or on an emulated GPU."""

from dataclasses import replace
from typing import Any

from metal_prefill.synth import ExpertShape, LayerShape, ScanShape
from support.small_models import ENCODERS, EXPERTS, MODELS, SmallModel

# For tests that do not depend on weights or dimensions.
TINY = SmallModel(dim=64, heads=3, kv_heads=1, ffn=64, seed=2)

VOCAB = 280
_SIZE: dict[str, Any] = {"dim": 32, "head_dim": 32, "heads": 2, "kv_heads": 1, "ffn": 32, "vocab": VOCAB}
_ENCODER_SIZE = {**_SIZE, "kv_heads": 2, "context": 64}

TINY_MODELS = {
    "gemma2": replace(MODELS["gemma2"], layers=2, **_SIZE),
    "gemma3": replace(MODELS["gemma3"], layers=2, **_SIZE),
    "gemma4": replace(
        MODELS["gemma4"], layers=3, layered=LayerShape(2, 16, 1, inputs=32, shared=1, shared_ffn=64), **_SIZE
    ),
    "gptneox": replace(MODELS["gptneox"], layers=1, **_SIZE),
    "phi2": replace(MODELS["phi2"], layers=1, **_SIZE),
    "lfm2": replace(MODELS["lfm2"], layers=2, conv_layers=(0,), **_SIZE),
    "mamba2": replace(MODELS["mamba2"], layers=1, dim=32, vocab=VOCAB, scan=ScanShape(32, 8, 2)),
    "falcon-h1": replace(MODELS["falcon-h1"], layers=1, scan=ScanShape(32, 8, 4, groups=2), **_SIZE),
    "qwen35": replace(MODELS["qwen35"], layers=2, scan=ScanShape(32, 8, 2, layers=(0,)), **_SIZE),
}
TINY_EXPERTS = {
    "lfm2moe": replace(
        EXPERTS["lfm2moe"], layers=2, conv_layers=(0,), experts=ExpertShape(3, 2, 32, dense_layers=1), **_SIZE
    ),
    "granitemoe": replace(EXPERTS["granitemoe"], layers=1, experts=ExpertShape(4, 1, 32, shared=32), **_SIZE),
}
TINY_ENCODERS = {
    "jina-bert-v2": replace(ENCODERS["jina-bert-v2"], layers=2, **_ENCODER_SIZE),
    "jina-bert-v2, code": replace(ENCODERS["jina-bert-v2, code"], layers=1, **_ENCODER_SIZE),
    "modern-bert": replace(ENCODERS["modern-bert"], layers=3, **_ENCODER_SIZE),
}

# For tests of states, which do not depend on dimensions. Two layers have states, with an attention layer
# between them unless all are recurrent.
_FEW: dict[str, Any] = {"dim": 32, "ffn": 32, "heads": 1, "kv_heads": 1, "head_dim": 32}
_SCAN = ScanShape(inner=64, state=16, heads=2)
_AROUND = (0, 2)
TINY_RECURRENT = {
    "lfm2": replace(MODELS["lfm2"], **_FEW, layers=3, conv_layers=_AROUND),
    "mamba2": replace(MODELS["mamba2"], layers=2, dim=32, scan=_SCAN),
    "granitehybrid": replace(MODELS["granitehybrid"], **_FEW, layers=3, scan=replace(_SCAN, layers=_AROUND)),
    "falcon-h1": replace(MODELS["falcon-h1"], **_FEW, layers=2, scan=replace(_SCAN, norm=False)),
    "qwen35": replace(MODELS["qwen35"], **_FEW, layers=3, scan=ScanShape(32, 16, 2, layers=_AROUND)),
}
