"""Model files that are valid in form: numbers at the edge of 32 bits, and weights that are NaN."""

import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.files.gguf_bytes import integer
from support.files.gguf_mutator import with_entries
from support.forked import in_child
from support.small_models import MODELS, with_tensor, write

from metal_prefill import GGUFError, Model, NumericalError, _core
from metal_prefill.files import GGUFFile


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("plain") / "m.gguf", MODELS["gqa 1"])


@pytest.mark.parametrize("context", [2**31 - 1, 2**31 - 64, 2**31 - 513, 2**30 + 1])
def test_contexts_near_the_limit_of_32_bits_work(
    device: str, plain: Path, tmp_path: Path, context: int
) -> None:
    path = with_entries(tmp_path / "m.gguf", plain, {"llama.context_length": integer(context)})
    ids = list(range(70))
    with Model(plain, device=device) as small, Model(path, device=device) as large:
        assert large.max_context == context
        np.testing.assert_array_equal(
            large.session().forward_prompt_logits(ids), small.session().forward_prompt_logits(ids)
        )
        with large.session() as session, session.fork() as fork:
            assert (session.max_context, fork.max_context) == (context, context)


def test_infinite_frequencies_are_rejected(device: str, tmp_path: Path) -> None:
    """Each number fits; a frequency of 1e-30 ** (-2 i / 32) / 1e-30 does not for the last pairs."""
    model = replace(MODELS["gqa 1"], rope_scaling="linear", rope_base=1e-30, rope_factor=1e-30)
    with pytest.raises(GGUFError, match=r"m.gguf: the rotary frequencies of layer 0 are not all finite"):
        Model(write(tmp_path / "m.gguf", model), device=device)


@pytest.mark.parametrize(
    ("model", "name", "max_context"),
    [
        ("rope frequency factors", "rope_freqs.weight", None),
        ("phi3, long rope", "rope_factors_long.weight", None),
        ("phi3, long rope", "rope_factors_short.weight", 64),
    ],
)
def test_frequency_factors_must_be_positive(
    device: str, tmp_path: Path, model: str, name: str, max_context: int | None
) -> None:
    plain = write(tmp_path / "plain.gguf", MODELS[model])
    for value in [0.0, -1.0, math.nan, math.inf]:
        path = with_tensor(tmp_path / "m.gguf", plain, name, partial(np.put, ind=1, v=value))
        with pytest.raises(GGUFError, match=rf"{path.name}: tensor {name} has the value .* at index 1"):
            Model(path, device=device, max_context=max_context)


def test_too_many_layers_are_refused() -> None:
    config = _core.ModelConfig(n_layers=100_001)
    with pytest.raises(ValueError, match="100001 layers: a model has at most 100000"):
        _core.ModelBuilder(config, np.zeros(1, np.uint8), config)


def test_a_nan_logit_is_an_error_and_changes_nothing(device: str, tmp_path: Path) -> None:
    whole = write(tmp_path / "plain.gguf", replace(MODELS["gqa 1"], output_type="F32"))
    rows = (MODELS["gqa 1"].vocab, -1)
    path = with_tensor(
        tmp_path / "m.gguf", whole, "output.weight", lambda values: values.reshape(rows)[7].fill(np.nan)
    )
    with Model(path, device=device) as model, Model(whole, device=device) as plain:
        session = model.session()
        session.forward_prompt([5, 6])  # the greedy token is one of the others
        for call in (session.forward_prompt_logits, session.score):
            with pytest.raises(NumericalError, match=r"of the token at position [234] is NaN"):
                call([1, 2, 3])
            assert session.tokens == [5, 6]
        with pytest.raises(NumericalError, match=r"logit 7 of the token at position 2 is NaN"):
            session.forward_token(1)
        plain.forward_prompt([5, 6])
        assert session.forward_prompt([1, 2, 3]) == plain.forward_prompt([1, 2, 3]) != 7


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_file_that_was_read_may_change_afterwards(tmp_path: Path) -> None:
    """If the file were still mapped, reading its weights would end the process by SIGBUS."""
    path = write(tmp_path / "m.gguf", replace(MODELS["gqa 1"], embedding="F32", types={"*": "F32"}))

    def work() -> bool:
        with Model(path, device="cpu", threads=1, mmap=False) as model:
            before = model.forward_prompt([1, 2, 3])
            os.truncate(path, 100)
            model.reset()
            return model.forward_prompt([1, 2, 3]) == before and model.tokenizer.decode([5, 6]) != ""

    assert in_child(work) == "True"


def test_read_files_are_like_mapped_files(device: str, plain: Path) -> None:
    with Model(plain, device=device, mmap=False) as read, Model(plain, device=device) as mapped:
        np.testing.assert_array_equal(
            read.session().forward_prompt_logits([1, 2]), mapped.session().forward_prompt_logits([1, 2])
        )
        for model in (read, mapped):
            assert not model.gguf.mapping.flags.writeable
        assert read.gguf.mapping.ctypes.data % 4096 == 0


def test_a_file_truncated_while_it_is_read_is_reported(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer:
        st_mode, st_size = plain.stat().st_mode, plain.stat().st_size + 5

    monkeypatch.setattr(os, "fstat", lambda _: Longer)
    with pytest.raises(GGUFError, match=rf"was truncated while being read, at byte {Longer.st_size - 5} of"):
        GGUFFile(plain, mmap=False)
