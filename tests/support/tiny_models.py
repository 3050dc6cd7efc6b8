"""Models of one or two layers of 32 dimensions, for tests that open or run one very often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from metal_prefill.synth import ScanShape
from support.small_models import ENCODERS, MODELS

VOCAB = 280
_SIZE: dict[str, Any] = {"dim": 32, "key_dim": 32, "heads": 2, "kv_heads": 1, "ffn": 32, "vocab": VOCAB}
_ENCODER_SIZE = {**_SIZE, "kv_heads": 2, "context": 64}

TINY_MODELS = {
    "gemma3": replace(MODELS["gemma3"], layers=2, **_SIZE),
    "lfm2": replace(MODELS["lfm2"], layers=2, conv_layers=(0,), **_SIZE),
    "mamba2": replace(MODELS["mamba2"], layers=1, dim=32, vocab=VOCAB, scan=ScanShape(32, 8, 2)),
    "falcon-h1": replace(MODELS["falcon-h1"], layers=1, scan=ScanShape(32, 8, 4, groups=2), **_SIZE),
    "qwen35": replace(MODELS["qwen35"], layers=2, scan=ScanShape(32, 8, 2, layers=(0,)), **_SIZE),
}
TINY_ENCODERS = {
    "jina-bert-v2": replace(ENCODERS["jina-bert-v2"], layers=2, **_ENCODER_SIZE),
    "jina-bert-v2, code": replace(ENCODERS["jina-bert-v2, code"], layers=1, **_ENCODER_SIZE),
    "modern-bert": replace(ENCODERS["modern-bert"], layers=3, **_ENCODER_SIZE),
}
