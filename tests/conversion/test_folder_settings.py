"""Settings of model folders, changed one at a time: a converted model follows each of them, or is refused."""

import copy
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.encoder_tasks import scores_of
from support.folders import model_folders, task_folders

from metal_prefill import GGUFError, Model, UnsupportedModelError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB = 300
IDS = np.random.default_rng(1).integers(3, VOCAB - 1, 60)
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2, "head_dim": 16}
_CONV = {"layer_types": ["conv", "full_attention"] * 2, "tie_word_embeddings": True, "block_multiple_of": 32}
_WINDOW = {"sliding_window": 8, "query_pre_attn_scalar": 16}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _GROUPED),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_GROUPED, **_WINDOW}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_GROUPED, **_WINDOW}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", _GROUPED),
    "granite": ("GraniteConfig", "GraniteForCausalLM", _GROUPED),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _GROUPED),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _GROUPED),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", {**_GROUPED, "sliding_window": 8}),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", _GROUPED),
    "hunyuan": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", _GROUPED),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {**_SHAPE, **_CONV, "num_key_value_heads": 2}),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertModel",
        {**_SHAPE, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "eurobert": ("EuroBertConfig", "EuroBertModel", {**_GROUPED, "mask_token_id": 3}),
}
# Settings that describe the folder or the training, or that change what the test feeds to the model.
_OTHERS = (
    *("architectures", "model_type", "transformers_version", "dtype", "vocab_size", "num_hidden_layers"),
    *("hidden_size", "layer_types", "tie_word_embeddings", "max_position_embeddings", "initializer_range"),
    *("output_hidden_states", "output_attentions", "return_dict", "is_encoder_decoder", "use_cache"),
)
_ROPES = (
    {"rope_theta": 777.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.5, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 20.0, "truncate": False},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
)


def changed(key: str, value: Any) -> Iterator[Any]:
    """Yield other values of a setting."""
    if "act" in key.split("_")[-1]:
        yield from ("gelu", "silu", "relu", "gelu_pytorch_tanh")
    elif isinstance(value, dict) and "rope_theta" in value:
        yield from ({"original_max_position_embeddings": 64, **value, **rope} for rope in _ROPES)
    elif isinstance(value, dict):
        yield from ({**value, k: part} for k in value for part in changed(key, value[k]))
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value * 2, value + 1, max(value // 2, 1))
    elif isinstance(value, float):
        yield value * 1.5
    elif value is None:
        yield from (16, 0.7, True)


def filled(model: Any) -> Any:
    """Give a model weights that depend on their names alone."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * 1.2 / weight.shape[-1] ** 0.5 if weight.ndim > 1 else weight + 0.2 * noise)
    return model.float().eval()


def outputs(path: Path, *, causal: bool) -> npt.NDArray[np.float32]:
    with Model(path, device="cpu", compute="f32", kv_dtype="f32") as model, model.session() as session:
        if causal:
            return session.forward_prompt_logits(IDS)
        (states,) = model.forward_batch([session], [IDS], output="hidden", rows="all")
        return np.asarray(states)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_changed_setting_is_followed_or_refused(tmp_path: Path, name: str) -> None:
    config_class, model_class, settings = CONFIGS[name]
    base = getattr(transformers, config_class)(**settings)
    causal = model_class.endswith("CausalLM")
    followed = 0
    stated = copy.deepcopy(base.to_dict())
    cases = [(key, value) for key in stated if key not in _OTHERS for value in changed(key, stated[key])]
    for i, (key, value) in enumerate([("", None), *cases]):
        path = tmp_path / str(i)
        try:
            config = type(base).from_dict({**copy.deepcopy(stated), **({key: value} if key else {})})
            model = filled(getattr(transformers, model_class)(config))
            with torch.no_grad():
                found = model(torch.tensor(IDS[None]))
        except Exception:  # not a configuration
            assert key, "the unchanged configuration must work"
            continue
        expected = (found.logits[0, -1] if causal else found.last_hidden_state[0]).numpy()
        model.save_pretrained(path)
        model_folders.byte_level_tokenizer(path, VOCAB)
        try:
            got = outputs(path, causal=causal)
        except (GGUFError, UnsupportedModelError):
            assert key, "the unchanged configuration must open"
            continue
        error = np.abs(got - expected).max() / np.abs(expected).max()
        assert error < 5e-5, f"{key} = {value}: {error:.2g} of the largest value"
        followed += 1
    assert followed > 5


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["Identity", "Sigmoid"])
@pytest.mark.parametrize("name", task_folders.RANKERS)
def test_a_saved_cross_encoder_keeps_its_activation(tmp_path: Path, name: str, activation: str) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = task_folders.RANKERS[name](tmp_path / "folder").write()
    function = getattr(torch.nn, activation)()
    sentence_transformers.CrossEncoder(str(folder), device="cpu", activation_fn=function).save_pretrained(
        str(tmp_path / "saved")
    )
    theirs = sentence_transformers.CrossEncoder(str(tmp_path / "saved"), device="cpu")
    pairs = [(task_folders.QUERY, document) for document in task_folders.DOCUMENTS]
    with Model(tmp_path / "saved", device="cpu", compute="f32", kv_dtype="f32") as model:
        scores = scores_of(model)
    np.testing.assert_allclose(scores, theirs.predict(pairs), rtol=1e-4, atol=1e-5)
