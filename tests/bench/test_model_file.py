"""The model that is measured where none is named."""

from __future__ import annotations

from pathlib import Path

from metal_prefill.bench import _model_file


def test_the_model_file_is_written_once(own_cache: Path) -> None:
    path = _model_file.smollm_shape()
    assert path.parent == own_cache
    facts = _model_file.read_facts(path)
    assert facts.model_type == "llama 135M Q4_0"
    assert facts.vocab_size == 49152
    written = path.stat().st_mtime_ns
    assert _model_file.smollm_shape() == path
    assert path.stat().st_mtime_ns == written
