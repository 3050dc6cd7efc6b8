"""`metal_prefill` itself, as an engine to measure."""

from __future__ import annotations

from typing import Any

import numpy as np

from metal_prefill import Model, Session, __version__
from metal_prefill.bench._cases import SAMPLING, Choice
from metal_prefill.bench._engines import Adapter, Identity, Ids, Options, Vectors
from metal_prefill.bench._machine import available_threads
from metal_prefill.tasks._embedding import check_pooling, vector_blocks
from metal_prefill.tasks._text_passes import TextPasses


class _Ours(Adapter):
    """`metal_prefill.Model` through its public calls."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._streams: list[Session] = []
        self._model = Model(
            options.path,
            device=options.device,
            max_context=options.max_context,
            threads=options.threads,
            compute=options.compute,
            kv_dtype=options.kv_dtype,
        )
        self._session = self._model.session()

    def identity(self) -> Identity:
        options = self._options
        return Identity(
            build=f"metal_prefill {__version__}",
            device=self._model.device,
            n_threads=int(self._model.stats().get("threads", available_threads())),
            settings=f"{self._model.backend}, compute {options.compute}, KV {options.kv_dtype}",
        )

    def clear(self) -> None:
        self._session.reset()

    def prefill(self, ids: Ids) -> None:
        self._session.forward_prompt(ids)

    def decode(self, ids: Ids) -> None:
        for token in ids.tolist():
            self._session.forward_token_greedy(token)

    def open_streams(self, count: int, context: int) -> None:
        for session in self._streams:
            session.close()
        self._streams = [self._model.session(max_context=context) for _ in range(count)]

    def prefill_streams(self, ids: Ids) -> None:
        self._model.forward_batch(self._streams, list(ids))

    def decode_streams(self, ids: Ids) -> None:
        for column in ids.T.reshape(ids.shape[1], ids.shape[0], 1):
            self._model.forward_batch(self._streams, list(column))

    def choose(self, ids: Ids, count: int, choice: Choice) -> list[int]:
        options: dict[str, Any] = dict(SAMPLING) if choice == "sampled" else {}
        options["speculate"] = "lookup" if choice == "lookup" else "off"
        pieces = self._session.stream(ids, count, min_tokens=count, **options)
        return [piece.token for piece in pieces]

    def embed(self, texts: list[Ids]) -> Vectors:
        passes = TextPasses(self._model.engine)
        return np.concatenate(list(vector_blocks(passes, check_pooling(passes.engine, None), texts)))


load = _Ours
