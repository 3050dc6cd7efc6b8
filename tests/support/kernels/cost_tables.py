"""Shapes of known models, predictions for them, and the table of docs/cost_model.md."""

from dataclasses import replace
from typing import Any

from gguf import GGMLQuantizationType

from metal_prefill.files import ModelConfig
from metal_prefill.files._model_tensors import expected_tensors
from metal_prefill.gpu._cost_model import CHIPS, Chip, Prediction, Shape, plan, predict
from metal_prefill.gpu._cost_model.shapes import TensorShape

# Fields of a model with a recurrent layer before one with attention.
RECURRENT: dict[str, Any] = {
    "architecture": "qwen35",
    "layer_kinds": ("gated_delta", "attention"),
    "n_layers": 2,
    "conv_taps": 4,
    "query_gate": True,
    "scan_heads": 4,
    "scan_groups": 2,
    "scan_key_dim": 32,
    "scan_value_dim": 32,
}


def uniform_shape(
    config: ModelConfig,
    # Tensor types in the layers, and of the embedding, to which the head is tied.
    kind: str,
    embedding: str,
) -> Shape:
    """Return the shape of a model whose layers have matrices of one type."""
    types = dict.fromkeys(("token_embedding", "output"), embedding)
    tensors = []
    for spec, layer, presence in expected_tensors(config):
        if presence == "optional" and not (spec.role == "token_types" and config.token_types):
            continue
        name = types.get(spec.role, kind if spec.kind in ("matrix", "experts") else "f32")
        tensors.append(TensorShape(spec.role, layer, GGMLQuantizationType[name.upper()], spec.shape))
    return Shape(config, tuple(tensors))


def smollm(**changes: Any) -> ModelConfig:
    """Return the configuration of SmolLM-135M with changes."""
    return ModelConfig(
        architecture="llama",
        n_layers=30,
        dim=576,
        n_heads=9,
        n_kv_heads=3,
        key_dim=64,
        value_dim=64,
        ffn_dim=1536,
        vocab_size=49152,
        context_length=4096,
        norm_eps=1e-5,
        rope_dim=64,
    ).replace(**changes)


def smollm_shape() -> Shape:
    """Return the shape of SmolLM-135M with layers in Q4_0 and embedding in Q8_0."""
    return uniform_shape(smollm(), "q4_0", "q8_0")


def predict_smollm(chip: Chip, tokens: int, position: int = 0, **options: Any) -> Prediction:
    """Predict the time of a prompt that a program waits for, or of a token while the next is in flight."""
    dispatches = plan(smollm_shape(), tokens, position=position, family=chip.family, gpu=chip.gpu, **options)
    return predict(chip, dispatches, tokens, waits=int(tokens > 1))


def with_cores(chip: Chip, cores: int) -> Chip:
    """Return a variant of a chip with fewer GPU cores, such as an M1 with seven."""
    return replace(chip, cores=cores, l2_gbs=chip.l2_gbs * cores / chip.cores)


def _rounded(value: float) -> str:
    digits = 3 if value >= 1000 else 2
    step = 10.0 ** (len(str(int(value))) - digits)
    return f"{round(value / step) * step:,.0f}"


def _in_range(prediction: Prediction) -> str:
    low, high = prediction.tokens_per_second_range
    return f"{_rounded(low)} to {_rounded(high)}"


def chips_table() -> str:
    """Return predictions by chip; decode is the token after 128."""
    lengths = (8, 32, 128, 512, 2048)
    lines = [["chip", "decode", "8 tokens", *map(str, lengths[1:])], ["---"] * 7]
    for name in ("M1", "M2", "M3", "M4", "M4 Pro", "M4 Max", "M5"):
        chip = CHIPS[name.lower().replace(" ", "-")]
        cells = [predict_smollm(chip, 1, 128), *(predict_smollm(chip, n) for n in lengths)]
        lines.append([name, *map(_in_range, cells)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def with_table(text: str) -> str:
    """Return the text of docs/cost_model.md with its table generated anew."""
    begin, end = "<!-- table: chips -->\n", "\n<!-- end -->"
    first = text.index(begin) + len(begin)
    return text[:first] + chips_table() + text[text.index(end, first) :]
