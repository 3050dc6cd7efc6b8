"""CTranslate2 on the CPU, for models of the architecture `llama`.

The weights of the GGUF file are dequantized and converted to CTranslate2's format, once per file. CTranslate2
rounds them to 8 bits with a scale for each row, and activations at run time; ``compute="f32"`` keeps float32.

A prompt is processed up to its first token. Decoding continues a cached context, and CTranslate2 chooses the
tokens, since it accepts none: the untimed first run of a test computes that context.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ctranslate2

from metal_prefill.bench._engines import Engine, Identity, Ids, Options
from metal_prefill.bench._machine import available_threads, counted, cpu_name
from metal_prefill.bench._peers.converted import convert_once, folder_of

COMPUTE_TYPES = {"int8": "int8_float32", "f32": "float32", "bf16": "bfloat16"}


def convert(path: Path) -> Path:
    """Return the converted model of a GGUF file, which is cached."""
    folder = folder_of("CTranslate2", ctranslate2.__version__, path)
    module = "metal_prefill.bench._peers.ctranslate2_model"
    convert_once("CTranslate2", path, folder, folder / "model.bin", ["-m", module, str(path), str(folder)])
    return folder


class CTranslate2(Engine):
    """Generator of a converted model."""

    def __init__(self, options: Options) -> None:
        self._threads = options.threads or available_threads()
        self._compute = COMPUTE_TYPES[options.compute]
        self._generator = ctranslate2.Generator(
            str(convert(Path(options.path))),
            device="cpu",
            compute_type=self._compute,
            inter_threads=1,
            intra_threads=self._threads,
        )
        self._context: list[str] = []

    def identity(self) -> Identity:
        """Return the identity of the engine."""
        return Identity(
            build=f"CTranslate2 {ctranslate2.__version__}",
            device=f"CPU ({cpu_name()}, {counted(self._threads, 'thread')})",
            threads=self._threads,
            settings=f"{self._generator.compute_type}, decodes tokens of its own choice",
        )

    def clear(self) -> None:
        """Empty the context."""
        self._context = []

    def prefill(self, ids: Ids) -> None:
        """Process a prompt up to its first token."""
        self._context = [str(token) for token in ids.tolist()]
        self._generate(self._context, 1)

    def decode(self, ids: Ids) -> None:
        """Generate as many tokens as there are ids, one at a time."""
        self._generate(self._context[-1:], len(ids), static_prompt=self._context[:-1] or None)

    def _generate(self, tokens: list[str], count: int, **options: Any) -> None:
        self._generator.generate_batch(
            [tokens], max_length=count, min_length=count, include_prompt_in_result=False, **options
        )


def load(options: Options) -> Engine:
    """Load the model."""
    return CTranslate2(options)
