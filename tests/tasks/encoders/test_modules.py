"""Modules after the transformer next to sentence-transformers and float64; passes over texts."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.closeness import lowest_cosine
from support.encoder_tasks import NEAR, FileOf, opened
from support.folders import encoder_folders, model_folders, task_folders
from support.folders.model_folders import DIM, Folder, values
from support.folders.task_folders import MODULES, TEXTS, recorded_vectors, static
from support.kernels.float64 import gelu, sigmoid, silu
from support.small_models import with_tensor

from metal_prefill import Model, NumericalError, _core
from metal_prefill.conversion import convert
from metal_prefill.sentence_transformers import SentenceTransformer
from metal_prefill.tasks import _text_passes
from metal_prefill.tasks._text_passes import TextPasses, pooled_blocks, pooled_states, whole_texts


@pytest.mark.parametrize("name", MODULES)
def test_vectors_match_sentence_transformers(device: str, file_of: FileOf, name: str) -> None:
    model = SentenceTransformer(file_of(MODULES[name]), device=device, model_kwargs={"dtype": "float32"})
    expected = recorded_vectors()[name]
    found = model.encode(TEXTS)
    np.testing.assert_allclose(found, expected, atol=NEAR[device] * np.abs(expected).max())
    assert lowest_cosine(found, expected) >= 0.99999


def test_a_call_chooses_the_pooling(file_of: FileOf) -> None:
    with opened(file_of(MODULES["mean_tokens"])) as model:
        for pooling, name in (("max", "max_tokens"), ("weighted_mean", "weightedmean_tokens")):
            found = model.embed(TEXTS, pooling=pooling, normalize=False)  # type: ignore[arg-type]
            np.testing.assert_allclose(found, recorded_vectors()[name], atol=2e-5)


def test_a_table_in_a_folder_of_its_own_opens(tmp_path: Path) -> None:
    folder = static(tmp_path / "m")
    whole = folder.write()
    with Model(whole, device="cpu") as model:
        expected = model.embed(TEXTS)
    place = tmp_path / "other" / "0_StaticEmbedding"
    place.mkdir(parents=True)
    for name in ("model.safetensors", "tokenizer.json"):
        (whole / name).rename(place / name)
    kind = "sentence_transformers.models.StaticEmbedding"
    folder.path = place.parent
    folder.json("modules.json", [{"idx": 0, "name": "0", "path": place.name, "type": kind}])
    with Model(place.parent, device="cpu") as model:
        np.testing.assert_array_equal(model.embed(TEXTS), expected)


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": np.tanh,
    "torch.nn.modules.activation.GELU": gelu,
    "torch.nn.modules.activation.ReLU": lambda x: np.maximum(x, 0),
    "torch.nn.modules.activation.SiLU": silu,
    "torch.nn.modules.activation.Sigmoid": sigmoid,
}


def pooled(path: Path, dense: int = 0) -> Folder:
    return model_folders.bert(path).pool(dense=dense, normalize=False)


def vectors(folder: Folder, name: str = "m") -> Any:
    with opened(convert(folder.write(), folder.path.parent / f"{name}.gguf")) as model:
        return model.embed(TEXTS, normalize=False)


@pytest.mark.parametrize(
    ("activation", "bias"), [*((name, True) for name in ACTIVATIONS), (next(iter(ACTIVATIONS)), False)]
)
def test_dense_layers_match_float64(tmp_path: Path, activation: str, bias: bool) -> None:
    states = vectors(pooled(tmp_path / "plain"), "plain").astype(np.float64)
    folder = pooled(tmp_path / "m", dense=16)
    matrix, offsets = values((16, DIM)) * 20, values((16,), 5)
    settings = {"in_features": DIM, "out_features": 16, "activation_function": activation}
    # The default of the class is a bias.
    folder.json("2_Dense/config.json", settings if bias else {**settings, "bias": False})
    tensors = {"linear.weight": matrix, **({"linear.bias": offsets} if bias else {})}
    save_file(tensors, folder.path / "2_Dense" / "model.safetensors")
    expected = ACTIVATIONS[activation](states @ matrix.T + bias * offsets) @ values((DIM, 16)).T
    np.testing.assert_allclose(vectors(folder), expected, rtol=1e-4, atol=1e-5)


def test_a_saved_length_of_vectors_is_the_default(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "m")
    whole = vectors(folder)
    folder.json("config_sentence_transformers.json", {"truncate_dim": 5})
    path = convert(folder.write(), tmp_path / "m.gguf")
    with opened(path) as model:
        np.testing.assert_array_equal(model.embed(TEXTS, normalize=False), whole[:, :5])
        np.testing.assert_array_equal(model.embed(TEXTS, normalize=False, dimensions=DIM), whole)
        assert model.embed(TEXTS[:1], pooling="none")[0].shape[1] == DIM


def test_a_text_that_fails_is_named_and_the_others_can_be_computed(file_of: FileOf) -> None:
    path = file_of(model_folders.bert)
    with opened(path) as model:
        passes = TextPasses(model.engine)
        good, bad = np.array([1, 2, 3], np.int32), np.array([1, model.config.vocab_size], np.int32)
        with pytest.raises(ValueError, match=rf"^text 1: token id {model.config.vocab_size} at index 1 "):
            list(pooled_states(passes, "mean", [good, bad]))
        alone = list(pooled_states(passes, "mean", [good]))
        assert alone[0].shape == (DIM,)
        assert np.all(np.isfinite(alone[0]))


@pytest.mark.parametrize("make", [model_folders.bert, task_folders.TAGGERS["modernbert"]])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooled_states_are_those_of_all_tokens(
    device: str, file_of: FileOf, make: Any, pooling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ModernBERT norms the states after its last layer."""
    with opened(file_of(make), device) as model:
        monkeypatch.setattr(_text_passes, "MOST_STATES", 7)  # of several calls
        passes = TextPasses(model.engine)
        texts = [np.arange(1, n + 1, dtype=np.int32) for n in (3, 4, 1, 9, 2)]
        whole = list(pooled_states(passes, "none", texts))
        assert [len(states) for states in whole] == [3, 4, 1, 9, 2]
        for states, vector in zip(whole, pooled_states(passes, pooling, texts), strict=True):
            expected = {"mean": states.mean(axis=0, dtype=np.float64), "cls": states[0], "last": states[-1]}
            assert np.array_equal(vector, expected[pooling].astype(np.float32))


def test_states_of_any_width_are_pooled(tmp_path: Path) -> None:
    """Sums of several columns are in registers together; other widths have a rest."""
    for width in (8, 24, 40):
        folder = encoder_folders.folder(tmp_path / f"{width}", f"bert, {width} columns").write()
        with opened(convert(folder, tmp_path / f"{width}.gguf")) as model:
            passes, texts = TextPasses(model.engine), [np.arange(1, 6, dtype=np.int32)]
            (states,) = pooled_states(passes, "none", texts)
            (vector,) = pooled_states(passes, "mean", texts)
            assert np.array_equal(vector, states.mean(axis=0, dtype=np.float64).astype(np.float32))


@pytest.mark.parametrize("pooling", ["none", "mean", "cls", "last"])
def test_a_state_that_is_nan_ends_its_text_alone(
    device: str, file_of: FileOf, tmp_path: Path, pooling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing sees the token of an expansion, so only its own state is NaN."""
    monkeypatch.setattr(_text_passes, "MOST_STATES", 3)  # of several calls

    plain = file_of(model_folders.bert)
    path = with_tensor(tmp_path / "m.gguf", plain, "token_embd.weight", lambda v: v.put(7 * DIM, np.nan))
    texts = [np.array(ids, np.int32) for ids in ([1, 2, 3], [1, 2, 3, 7], [4, 5])]
    with opened(path, device) as model:
        passes = TextPasses(model.engine)
        first, failed, last = whole_texts(passes, texts, pooling, [0, 1, 0])
        assert isinstance(failed, NumericalError)
        assert "the hidden state of the token at position 3 is NaN" in str(failed)
        for state, expected in zip((first, last), whole_texts(passes, texts[::2], pooling), strict=True):
            assert np.array_equal(state, expected)
        with pytest.raises(NumericalError, match="text 1: the hidden state of the token at position 3"):
            list(pooled_blocks(passes, pooling, texts, [0, 1, 0]))
        with pytest.raises(NumericalError, match="text 2: "):
            model.embed(["!", "!", "#"], pooling=pooling)  # of which the last one has token 7


def test_texts_of_causal_models_are_not_pooled_in_their_pass(demo: Model) -> None:
    with pytest.raises(ValueError, match="only texts whose tokens see later ones are pooled"):
        whole_texts(TextPasses(demo.engine), [np.array([1, 2], np.int32)], "mean")


def test_whole_texts_fill_the_rows_of_a_pass(file_of: FileOf) -> None:
    """Those that do not fit in the rest of a pass go into the next one."""
    with Model(file_of(model_folders.bert), device="cpu", threads=1) as model:
        core = model.engine.core
        assert core.pass_rows == 128
        lengths = np.array([40, 40, 40, 30, 8, 2], np.int32)
        done: list[int] = []
        core.forward_batch(
            [_core.Texts(core, np.ones(lengths.sum(), np.int32), lengths, "cls")],
            lambda tokens, _: done.append(tokens),
        )
    assert np.diff([0, *done]).tolist() == [128, 30 + 2]


@pytest.mark.parametrize(
    ("lengths", "pooling", "message"),
    [
        ([2, 2], "mean", "text 1 has 2 tokens, of 1 that are left"),
        ([2, 0], "mean", "text 1 has 0 tokens, of 1 that are left"),
        ([2, -1], "mean", "text 1 has -1 tokens, of 1 that are left"),
        ([2], "mean", "the texts have 2 tokens, but 3 were given"),
        ([3], "max", "pooling of a text is none, mean, cls or last, not 'max'"),
    ],
)
def test_texts_of_wrong_lengths_are_refused(
    file_of: FileOf, lengths: list[int], pooling: str, message: str
) -> None:
    path = file_of(model_folders.bert)
    with opened(path) as model, pytest.raises(ValueError, match=re.escape(message)):
        _core.Texts(model.engine.core, np.zeros(3, np.int32), np.array(lengths, np.int32), pooling)


def test_values_beyond_16_bits_are_an_error_that_names_the_option(tmp_path: Path) -> None:
    folder = model_folders.bert(tmp_path / "m").pool()
    folder.tensors["encoder.layer.0.attention.self.value.weight"] *= 1e6
    path = convert(folder.write(), tmp_path / "m.gguf")
    with (
        Model(path, device="cpu") as narrow,
        pytest.raises(NumericalError, match=r"text 0: .*; if keys or values"),
    ):
        narrow.embed(["a b c"])
    with Model(path, device="cpu", kv_dtype="f32") as wide:
        assert np.isfinite(wide.embed(["a b c"])).all()
