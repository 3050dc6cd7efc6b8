"""Expansion of queries in late interaction: files with any settings, and calls with any numbers of tokens.

A query has as many vectors as the file requires, or the call raises an error of the package. Texts in the
same call have the bits that they have alone.
"""

import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.files.gguf_bytes import BOOL, F32, I32, STRING, U32, U64, text
from support.files.gguf_mutator import INTEGERS, Parts, random_scalar, take_apart
from support.folders.model_folders import CONTEXT
from support.folders.task_folders import LATE
from support.fuzzing import fuzz
from support.hostile_texts import hostile_text

from metal_prefill import MetalPrefillError, Model
from metal_prefill.conversion import convert
from metal_prefill.tasks._text_passes import TextPasses, whole_texts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of texts that lost their ends

SETTINGS = "metal_prefill.query_expansion."
NEAR_CONTEXT = (1, 2, 31, 32, CONTEXT - 1, CONTEXT, CONTEXT + 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("late")
    return convert(LATE["unseen"](folder / "folder").write(), folder / "model.gguf", tensor_type="Q8_0")


def value(random: Random) -> tuple[int, bytes]:
    """Return the type and the bytes of a value, most often of an integer that fits."""
    kind = random.choice((U32, U32, U32, I32, F32, BOOL, BOOL, STRING, U64))
    if kind == STRING:
        return kind, text("32")
    return kind, random_scalar(kind, random, (0, 1) if kind == BOOL else (*NEAR_CONTEXT, *INTEGERS))


def changed(parts: Parts, random: Random) -> Parts:
    """Change, drop or repeat settings of the expansion."""
    metadata = list(parts.metadata)
    for _ in range(random.choice((1, 1, 2, 4))):
        own = [i for i, (key, _, _) in enumerate(metadata) if key.startswith(SETTINGS.encode())]
        if not own:
            break
        i = random.choice(own)
        key = metadata[i][0]
        metadata[i : i + 1] = [] if random.random() < 0.1 else [(key, *value(random))]
    return Parts(metadata, parts.tensors, parts.data)


def test_files_rank_or_raise_an_error(path: Path) -> None:
    parts = take_apart(path)

    def use(file: Path, random: Random) -> None:
        queries = [hostile_text(random), "who", ""]
        with suppress(MetalPrefillError, ValueError), Model(file, device="cpu", threads=1) as model:
            length: Any = model.gguf.metadata.get(SETTINGS + "length", 0)
            options: dict[str, Any] = {"instruction": "query", "truncate": "end"}
            for query, vectors in zip(queries, model.embed(queries, **options), strict=True):
                np.testing.assert_array_equal(model.embed([query], **options)[0], vectors)
                assert min(length, CONTEXT) <= len(vectors) <= CONTEXT
                assert np.all(np.isfinite(vectors))
            scores = [item.score for item in model.rerank("who", queries, truncate="end")]
            assert np.all(np.isfinite(scores))

    fuzz("expansion", 70, lambda random: changed(parts, random).assemble(), use)


def test_calls_with_any_expansion_leave_other_texts_unchanged(path: Path) -> None:
    with Model(path, device="cpu", threads=2) as model, Model(path, device="cpu", threads=1) as one:
        vocabulary = model.config.vocab_size

        def computed(model: Model, texts: Any, extra: list[int], pooling: Any, seen: bool) -> list[Any]:
            return list(whole_texts(TextPasses(model.engine), texts, pooling, extra, seen=seen))

        def make(random: Random) -> bytes:
            lengths = [random.randint(1, CONTEXT) for _ in range(random.randint(1, 6))]
            extra = [random.choice((0, 0, 1, n - 1, n, -1, -(2**31), 2**31 - 1)) for n in lengths]
            pooling = random.choice(("none", "mean", "cls", "last"))
            return json.dumps([lengths, extra, pooling, random.random() < 0.5]).encode()

        def use(call: Path, random: Random) -> None:
            lengths, extra, pooling, seen = json.loads(call.read_bytes())
            texts = [np.array(random.choices(range(vocabulary), k=n), np.int32) for n in lengths]
            together = computed(model, texts, extra, pooling, seen)
            for ids, n, found in zip(texts, extra, together, strict=True):
                (alone,) = computed(one, [ids], [n], pooling, seen)
                valid = 0 <= n < len(ids)
                assert isinstance(found, np.ndarray) == isinstance(alone, np.ndarray) == valid
                if valid:
                    np.testing.assert_array_equal(found, alone)
                    assert np.all(np.isfinite(found))
                else:
                    assert isinstance(found, ValueError), found

        fuzz("expanded-call", 70, make, use)
