"""Paths that entries of several modules name."""

from __future__ import annotations

PACKAGE = "python/metal_prefill"
ENGINE = "tests/test_engine.py"
BATCH = "tests/test_batch.py"
ENCODERS = "tests/test_encoders.py"
ENCODER_TASKS = "tests/encoder_tasks"
Q8 = "tests/test_q8_cache.py"
STATES = "tests/recurrent"
MODELS = f"{ENGINE}::test_logits_match_the_reference_on_every_kind_of_model"
