"""Encoders: models of the BERT family on both engines, next to the float64 reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.closeness import LOWEST_COSINE, assert_close, hidden_states, lowest_cosine
from support.files.gguf_bytes import string
from support.files.gguf_mutator import take_apart, with_entries
from support.reference import ReferenceModel
from support.small_models import ENCODERS, SmallModel, with_tensor, write

from metal_prefill import GGUFError, Model, UnsupportedModelError

SEPARATOR = 3  # of the WordPiece vocabulary


def ids_of(model: SmallModel, n: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return random tokens with a separator in the middle."""
    ids = np.random.default_rng(seed).integers(5, model.vocab, n)
    ids[n // 2] = SEPARATOR
    return ids


def test_layers_take_turns_in_the_memory_of_k_and_v(device: str, tmp_path: Path) -> None:
    pages = {}
    for layers in (1, 3):
        path = write(tmp_path / f"{layers}.gguf", replace(ENCODERS["bert"], layers=layers))
        with Model(path, device=device) as model:
            pages[layers] = model.stats()["kv_page_bytes"]
    assert pages[1] == pages[3]


def test_more_threads_take_more_texts_at_a_time(tmp_path: Path) -> None:
    """A pass has room for the longest text, and for 128 tokens of each thread."""
    path = write(tmp_path / "model.gguf", replace(ENCODERS["bert"], context=80))
    texts = [ids_of(ENCODERS["bert"], 40, seed) for seed in range(20)]
    passes, vectors = [], []
    for threads in (1, 8):
        with Model(path, device="cpu", threads=threads) as model:
            done: list[int] = []
            sessions = [model.session() for _ in texts]
            states = model.forward_batch(
                sessions, texts, output="hidden", progress=lambda *n, done=done: done.append(n[0])
            )
            passes.append(len(done))
            vectors.append(np.stack(states))
    assert passes == [7, 1]  # of 3 texts, and of all
    np.testing.assert_array_equal(vectors[0], vectors[1])


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_match_the_reference(device: str, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model.gguf", ENCODERS[name])
    reference = ReferenceModel(path)
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        for n in (1, 2, 8, 9, 70):
            ids = ids_of(ENCODERS[name], n)
            assert_close(device, hidden_states(model, ids), reference.forward(ids).hidden)


@pytest.mark.parametrize("name", ENCODERS)
def test_fewer_bits_stay_near_the_reference(tmp_path: Path, name: str) -> None:
    """The text has more than the 96 tokens for which a thread computes products of pairs at a time."""
    path = write(tmp_path / "model.gguf", ENCODERS[name])
    ids = ids_of(ENCODERS[name], 130)
    expected = ReferenceModel(path).forward(ids).hidden
    for compute in ("int8", "w8a8", "int16", "bf16"):
        with Model(path, device="cpu", compute=compute, threads=1) as model:
            assert lowest_cosine(hidden_states(model, ids), expected) >= LOWEST_COSINE, compute


COMPUTE = ("int8", "w8a8", "int16", "bf16")


# Products know no architecture: each mode is tried with some, and each architecture with two modes.
@pytest.mark.parametrize(
    ("name", "compute"),
    [(name, COMPUTE[(i + shift) % 4]) for i, name in enumerate(ENCODERS) for shift in (0, i // 4 % 3 + 1)],
)
def test_a_text_is_bit_identical_alone_and_in_any_batch(tmp_path: Path, name: str, compute: str) -> None:
    path = write(tmp_path / "model.gguf", ENCODERS[name])
    texts = [ids_of(ENCODERS[name], n, seed=n) for n in (5, 70, 1, 33, 16, 130)]
    options: dict[str, Any] = {"device": "cpu", "compute": compute}
    with Model(path, threads=1, **options) as one, Model(path, threads=2, **options) as two:
        alone = [hidden_states(one, ids) for ids in texts]
        for order in (slice(None), slice(None, None, -1)):
            sessions = [two.session() for _ in texts]
            together = two.forward_batch(sessions, texts[order], output="hidden", rows="all")
            for got, wanted in zip(together, alone[order], strict=True):
                np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("compute", ["w8a8", "bf16"])
def test_threads_that_finish_layers_in_uneven_blocks_use_memory_of_their_own(
    tmp_path: Path, compute: str
) -> None:
    """130 rows are not a multiple of the tiles of four threads, any of which may take any block."""
    path = write(tmp_path / "model.gguf", ENCODERS["bert"])
    ids = ids_of(ENCODERS["bert"], 130)
    with Model(path, threads=1, device="cpu", compute=compute) as model:
        alone = hidden_states(model, ids)
    with Model(path, threads=4, device="cpu", compute=compute) as model:
        for _ in range(20):
            np.testing.assert_array_equal(hidden_states(model, ids), alone)


def with_activation(path: Path, name: str) -> Path:
    """Write a small file of ModernBERT that states its activation."""
    plain = write(path.with_suffix(".plain"), ENCODERS["modern-bert"])
    return with_entries(path, plain, {"modern-bert.hidden_activation": string(name)})


@pytest.mark.parametrize("name", ["gelu", "silu", "gelu_pytorch_tanh"])
def test_the_activation_of_a_file_is_used(device: str, tmp_path: Path, name: str) -> None:
    """Files of Granite Embedding 97M state SiLU."""
    path = with_activation(tmp_path / "model.gguf", name)
    ids = ids_of(ENCODERS["modern-bert"], 20)
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        assert_close(device, hidden_states(model, ids), ReferenceModel(path).forward(ids).hidden)


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    path = with_activation(tmp_path / "model.gguf", "relu")
    with pytest.raises(
        UnsupportedModelError,
        match=r"modern-bert\.hidden_activation is relu; supported: gelu, gelu_new, gelu_fast, "
        "gelu_pytorch_tanh, silu",
    ):
        Model(path)


def test_tokens_after_a_separator_have_the_next_type(device: str, tmp_path: Path) -> None:
    """The second segment of a pair has the second row of the table, however many separators follow."""
    model = ENCODERS["bert, float32"]

    def change(values: Any) -> None:
        values[model.dim :] += 1  # of type 1

    plain = write(tmp_path / "model.gguf", model)
    changed = with_tensor(tmp_path / "changed.gguf", plain, "token_types.weight", change)
    one = np.array([2, 9, 10, SEPARATOR])
    pair = np.array([2, 9, SEPARATOR, 11, SEPARATOR, 12])
    with Model(plain, device=device) as a, Model(changed, device=device) as b:
        np.testing.assert_array_equal(hidden_states(a, one), hidden_states(b, one))
        assert not np.array_equal(hidden_states(a, pair), hidden_states(b, pair))
    reference = ReferenceModel(changed)
    with Model(changed, device=device, compute="f32", kv_dtype="f32") as b:
        assert_close(device, hidden_states(b, pair), reference.forward(pair).hidden)


def test_an_encoder_has_no_logits(device: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ENCODERS["bert"])
    with Model(path, device=device) as model, model.session() as session:
        for call in (
            model.forward_prompt,
            session.forward_prompt_logits,
            session.forward_prompt,
            model.score,
        ):
            with pytest.raises(ValueError, match="this model is an encoder: it has no output projection"):
                call([2, 9, 3])
        assert session.position == 0
        model.forward_batch([session], [[2, 9, 3]], output="hidden")
        with pytest.raises(ValueError, match="see those after them"):
            model.forward_batch([session], [[2, 9, 3]], output="hidden")


@pytest.mark.parametrize(
    ("architecture", "tensor"),
    [
        ("bert", "position_embd.weight"),
        ("bert", "token_embd_norm.bias"),
        ("bert", "blk.1.attn_output.bias"),
        ("bert", "blk.1.ffn_up.bias"),
        ("bert", "blk.0.attn_output_norm.weight"),
        ("bert", "blk.0.layer_output_norm.bias"),
        ("nomic-bert", "blk.1.ffn_gate.weight"),
        ("nomic-bert", "blk.1.attn_qkv.weight"),
        ("modern-bert", "output_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, architecture: str, tensor: str) -> None:
    whole = write(tmp_path / "whole.gguf", ENCODERS[architecture])
    parts = take_apart(whole)
    parts.tensors = [t for t in parts.tensors if t[0] != tensor]
    path = parts.write(tmp_path / "model.gguf")
    with pytest.raises(GGUFError, match=rf"tensor.* {tensor}.* missing|is missing, as is {tensor}"):
        Model(path, device="cpu")


def test_an_encoder_with_an_output_projection_is_rejected(tmp_path: Path) -> None:
    parts = take_apart(write(tmp_path / "whole.gguf", ENCODERS["bert"]))
    parts.replace_tensor("token_types.weight", new_name="output.weight")
    path = parts.write(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match=r"tensor output\.weight is not part of a bert model"):
        Model(path, device="cpu")
