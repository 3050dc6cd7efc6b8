"""Interfaces and registry of the engines that can be measured.

A worker process makes one engine. All engines get the same token ids, start from an empty context, and
compute logits only for the last token of a prompt and for every decoded token. The ids to decode are given,
except in tests of choosing them. (This package's calls also find the largest logit, which they return.)
Sequences in one batch have different tokens and share nothing.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from metal_prefill.bench._cases import Ability, Case, Choice
from metal_prefill.errors import MetalPrefillError, MissingExtraError


class BenchError(MetalPrefillError):
    """A benchmark cannot begin or continue; names the engine."""


Ids = npt.NDArray[np.int32]
Vectors = npt.NDArray[np.float32]

OURS = "metal_prefill"


@dataclass(frozen=True)
class Options:
    path: str  # path of the GGUF file
    max_context: int  # number of positions that the longest test needs
    max_prompt: int  # number of tokens of the longest prompt
    threads: int | None = None  # number of threads; None selects the engine's default
    # As for `metal_prefill.Model`; peers apply them as far as supported.
    device: str = "auto"
    compute: str = "int8"
    kv_dtype: str = "f16"


@dataclass(frozen=True)
class Identity:
    build: str  # name and version
    device: str  # device; an emulator is named as such
    n_threads: int
    settings: str  # settings that affect its speed, for the reader of a table


class Adapter:
    """A loaded model, which supports the tests that its `Kind` does not exclude."""

    def identity(self) -> Identity:
        raise NotImplementedError

    def clear(self) -> None:
        """Empty the context."""
        raise NotImplementedError

    def prefill(self, ids: Ids) -> None:
        """Append a prompt and compute the logits of its last token."""
        raise NotImplementedError

    def decode(self, ids: Ids) -> None:
        """Append tokens one at a time, computing logits after each."""
        raise NotImplementedError

    def open_streams(self, count: int, context: int) -> None:
        """Create `count` empty contexts of `context` positions each."""
        raise NotImplementedError

    def prefill_streams(self, ids: Ids) -> None:
        """Append prompts, ``[streams, n]``, and compute the logits of the last token of each."""
        raise NotImplementedError

    def decode_streams(self, ids: Ids) -> None:
        """Append tokens, ``[streams, n]``, one of each stream at a time, computing logits after each."""
        raise NotImplementedError

    def choose(self, ids: Ids, count: int, choice: Choice) -> list[int]:
        """Choose `count` tokens after `ids`, of which all but the last are in the context, and return them.

        Tokens that end a text are excluded.
        """
        raise NotImplementedError

    def embed(self, texts: list[Ids]) -> Vectors:
        """Return the pooled vectors of texts, normalized, float32 ``[texts, dim]``."""
        raise NotImplementedError


class Kind(NamedTuple):
    """Requirements of an engine, and tests that it cannot run."""

    modules: tuple[str, ...]  # modules that its adapter imports
    package: str  # package to install
    extra: str = "bench"  # extra of this package that includes it
    generates: bool = True  # False: it is measured on vectors of texts alone
    without: Mapping[Ability, str] = {}  # reasons why tests of an ability are not measured, by ability


KINDS = {
    OURS: Kind((), "metal_prefill"),
    "llama.cpp": Kind(("llama_cpp",), "llama-cpp-python"),
    "openvino": Kind(
        ("openvino",),
        "openvino, with openvino-genai for prompts and nncf, onnx, torch and transformers for encoders",
        without={
            "streams": "its graph holds one sequence; OpenVINO GenAI's batches choose tokens themselves "
            "and accept none",
            "choices": "its graph computes logits but chooses no tokens",
        },
    ),
    "transformers": Kind(
        ("torch", "transformers", "gguf", "accelerate"),
        "torch, transformers, gguf and accelerate",
        "bench-transformers",
        generates=False,
    ),
    "onnxruntime": Kind(
        ("onnxruntime", "onnx", "torch", "transformers"),
        "onnxruntime, onnx, torch and transformers",
        "bench-transformers",
        generates=False,
    ),
}


def peers(embeds: bool) -> list[str]:
    """Return the names of peers that embed texts, or that generate."""
    return [name for name, kind in KINDS.items() if name != OURS and (embeds or kind.generates)]


def check_peer(name: str, embeds: bool) -> None:
    """Raise an error unless an engine is one of `peers`, and installed; it names the package to install."""
    if name not in (known := peers(embeds)):
        if name in peers(embeds=True):
            raise ValueError(f"{name} is measured on embeddings only: use `run_embeddings`")
        raise ValueError(f"unknown engine {name!r} to compare with; known are {', '.join(known)}")
    kind = KINDS[name]
    for module in kind.modules:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(
                f"comparing with {name} needs {kind.package}, which is not installed: "
                f"pip install 'metal_prefill[{kind.extra}]'"
            )


def why_not(name: str, case: Case) -> str:
    """Return the reason why an engine cannot run a test; empty if it can."""
    return KINDS[name].without.get(case.ability, "") if name in KINDS else ""


def load(name: str, options: Options) -> Adapter:
    module = importlib.import_module(f"metal_prefill.bench._peers.{name.replace('.', '_')}")
    return module.load(options)
