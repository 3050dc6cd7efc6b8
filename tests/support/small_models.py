"""Small synthetic models that together cover every tensor type, shape and feature of the format.

Weights are random, scaled so that attention spreads over earlier tokens and activations keep their size.
`MODELS` is the catalogue; `write` writes the file of one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill import Model
from metal_prefill.files._architecture import ARCHITECTURES
from metal_prefill.files._model_tensors import MATRIX_TYPES
from metal_prefill.synth import ExpertShape, LayerShape, ModelShape, ScanShape, _file, _tensors
from metal_prefill.synth._blocks import BLOCK_FORMATS
from metal_prefill.synth._tensors import Role, Tensor
from support.files.gguf_mutator import take_apart
from support.files.gguf_reader import GGUFReader

TYPES = MATRIX_TYPES
# Types that are tested with every feature. Others differ only in how a row is read.
COMMON_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def half_fields(kind: str) -> list[int]:
    """Return where the blocks of a quantized type hold float16."""
    layout = BLOCK_FORMATS[kind]
    if layout.exponent_scale or layout.fp8_scales:
        return []
    return [layout.scale_at] if layout.min_at is None else [layout.scale_at, layout.min_at]


@dataclass(frozen=True)
class SmallModel(ModelShape):
    """Properties of a model that `write` makes."""

    layers: int = 2
    dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 96
    vocab: int = 320
    context: int = 1024
    rope_factor: float = 4.0
    original_context: int | None = 256
    embedding: str = "Q8_0"
    # Patterns of tensor names and their types; the last match wins.
    types: Mapping[str, str] = field(default_factory=lambda: {"*": "Q4_0"})
    fused: bool = False  # whether matrices are stacked, as in some files of the architecture
    seed: int = 1


# Heads and feed-forwards of several widths, and layers that share keys and values.
_GEMMA4 = SmallModel(
    layers=6,
    kv_heads=1,
    head_dim=64,
    rope_base=1e6,
    window=16,
    scales=(("final_logit_softcapping", 12.0),),
    layered=LayerShape(2, 32, 1, inputs=32, shared=3, shared_ffn=192),
)


def _named(models: Mapping[str, SmallModel]) -> dict[str, SmallModel]:
    """Set each model's architecture to the beginning of its name, unless the model sets another one."""
    found = {name: name.partition(",")[0] for name in models}
    for name, model in models.items():
        if found[name] not in ARCHITECTURES and model.architecture == SmallModel.architecture:
            raise ValueError(f"model {name!r} has no architecture: its name must begin with one")
    return {
        name: replace(model, architecture=found[name]) if found[name] in ARCHITECTURES else model
        for name, model in models.items()
    }


def _of_type(kind: str) -> SmallModel:
    """Set the type of every matrix, including embedding and output; 256 columns fit all blocks."""
    shape = SmallModel(layers=1, dim=256, head_dim=64, ffn=256)
    return replace(shape, embedding=kind, output_type=kind, types={"*": kind})


def _mixed(types: Mapping[str, str]) -> SmallModel:
    """Set most matrices to Q4_K, and the others to these types."""
    of_most = {"*": "Q4_K", "*.attn_v.*": "Q6_K"}
    return SmallModel(dim=256, head_dim=64, ffn=512, embedding="Q6_K", types=of_most | dict(types))


_GRANITE_SCALES = (
    ("embedding_scale", 12.0),
    ("residual_scale", 0.22),
    ("logit_scale", 6.0),
    ("attention.scale", 0.125),
)
_MAMBA2 = SmallModel(
    layers=3, heads=0, kv_heads=0, head_dim=0, ffn=0, scan=ScanShape(inner=128, state=32, heads=4)
)

_QWEN35 = SmallModel(
    layers=4,
    dim=96,
    head_dim=64,
    rope_dims=16,
    rope_base=1e7,
    output_type="Q8_0",
    scan=ScanShape(inner=64, state=32, heads=2, layers=(0, 1, 2)),
)

# Dimensions that fit no block.
_ODD = SmallModel(dim=50, heads=2, kv_heads=1, head_dim=24, ffn=70, embedding="F16", types={"*": "F32"})
_HEADS_OF_26: dict[str, Any] = {
    "dim": 78,
    "heads": 3,
    "kv_heads": 3,
    "head_dim": 26,
    "ffn": 100,
    "types": {"*": "F32"},
    "embedding": "F16",
}
_NARROW = replace(_ODD, dim=60, heads=6, kv_heads=2, head_dim=10)

EXPERTS = _named(
    {
        "granitemoe": SmallModel(scales=_GRANITE_SCALES, experts=ExpertShape(5, 2, 96, shared=64)),
        "granitemoe, mixed types": SmallModel(
            dim=256,
            head_dim=64,
            ffn=256,
            layers=1,
            scales=_GRANITE_SCALES,
            types={"*": "Q4_K", "*_down_*": "Q6_K", "*_shexp.*": "Q8_0"},
            experts=ExpertShape(16, 4, 256, shared=512),
        ),
        "granitehybrid, experts": SmallModel(
            layers=3,
            dim=96,
            head_dim=24,
            scales=_GRANITE_SCALES,
            scan=ScanShape(inner=192, state=16, heads=4, layers=(0, 1)),
            experts=ExpertShape(4, 4, 96, shared=64),
        ),
        "qwen3moe": SmallModel(layers=3, head_dim=64, output_type="Q8_0", experts=ExpertShape(9, 3, 64)),
        "olmoe": SmallModel(dim=128, kv_heads=4, ffn=32, output_type="Q8_0", experts=ExpertShape(64, 8, 32)),
        "granitemoe, one of three experts, odd dimensions": replace(
            _NARROW, kv_heads=6, scales=_GRANITE_SCALES, experts=ExpertShape(3, 1, 70)
        ),
        "lfm2moe": SmallModel(
            layers=4,
            dim=128,
            rope_base=1e6,
            conv_layers=(0, 1, 3),
            experts=ExpertShape(6, 2, 64, dense_layers=2),
        ),
    }
)

_LLAMAS = {
    **{f"type {kind}": _of_type(kind) for kind in TYPES},
    "mixed types": _mixed({"*.attn_k.*": "Q5_0", "*.ffn_down.*": "Q8_0", "blk.1.*": "Q4_1"}),
    "mixed K-quants": _mixed({"*.ffn_down.*": "Q6_K", "blk.1.attn_k.*": "Q8_0"}),
    "16-bit floats": SmallModel(types={"*": "F16", "*.ffn_down.*": "BF16"}),
    "dimensions that fit no block": replace(_NARROW, dim=50, value_dim=14),
    "gqa 1": SmallModel(heads=3, kv_heads=3, dim=96),
    "gqa 3": SmallModel(heads=9, kv_heads=3, dim=288),
    "gqa 8": SmallModel(heads=8, kv_heads=1, dim=256),
    **{f"head_dim {n}": SmallModel(heads=4, dim=4 * n, head_dim=n) for n in (32, 64, 80, 128)},
    "head_dim 16": SmallModel(heads=4, dim=64, head_dim=16),
    "narrower than its heads": SmallModel(heads=4, dim=96, head_dim=64),
    "values wider than keys": SmallModel(head_dim=32, value_dim=64),
    "values narrower than keys": SmallModel(head_dim=64, value_dim=32),
    "separate output": SmallModel(output_type="Q6_K", dim=256, head_dim=64),
    "vocabulary of 301": SmallModel(vocab=301),
    "vocabulary of 1021, separate": SmallModel(vocab=1021, output_type="Q8_0"),
    "sentencepiece": SmallModel(tokenizer="llama", vocab=400),
    "rope base": SmallModel(rope_base=500000.0),
    "rope of half the head": SmallModel(rope_dims=16),
    "linear rope scaling": SmallModel(rope_scaling="linear"),
    "yarn rope scaling": SmallModel(rope_scaling="yarn"),
    "rope frequency factors": SmallModel(rope_scaling="llama3", rope_base=500000.0),
    "large norm epsilon": SmallModel(norm_eps=0.1),
    "biases": SmallModel(qkv_bias=True),
    "all biases": SmallModel(qkv_bias=True, all_biases=True),
    "long context": SmallModel(layers=1, context=4096),
    "smollm shape": SmallModel(dim=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=512),
    "wide feed-forward": SmallModel(dim=64, ffn=2048),
}
_OTHERS = _named(
    {
        "qwen2": SmallModel(dim=128, qkv_bias=True),
        "qwen3": SmallModel(head_dim=64),
        "smollm3": SmallModel(layers=5),
        "granite": SmallModel(
            qkv_bias=True,
            norm_eps=0.01,  # the scale of the residual stream must not change it
            scales=_GRANITE_SCALES,
        ),
        "hunyuan-dense": SmallModel(head_dim=64),
        "olmo2": SmallModel(dim=128, output_type="Q8_0"),
        "olmo2, windows": SmallModel(
            layers=5, dim=128, output_type="Q8_0", window=16, rope_scaling="yarn", rope_base=5e5
        ),
        "exaone4": SmallModel(dim=128, rope_scaling="llama3", rope_base=1e6),
        "exaone4, windows": SmallModel(layers=5, dim=128, window=16),
        "ernie4_5": SmallModel(head_dim=64),
        "phi3": SmallModel(dim=128, kv_heads=4, fused=True),
        "phi3, long rope": SmallModel(
            dim=128, kv_heads=4, rope_scaling="longrope", original_context=64, fused=True
        ),
        "minicpm": SmallModel(scales=_GRANITE_SCALES[:3]),
        "minicpm, long rope": SmallModel(
            scales=_GRANITE_SCALES[:3], rope_scaling="longrope", original_context=64
        ),
        "mistral3": SmallModel(
            head_dim=64,
            rope_scaling="yarn",
            context=4096,
            original_context=1024,
            scales=(("attention.temperature_scale", 0.1), ("rope.scaling.yarn_log_multiplier", 1.0)),
        ),
        "qwen3vl": SmallModel(head_dim=48),
        "gpt2": SmallModel(dim=128, kv_heads=4, fused=True),
        "gpt2, heads of 26": SmallModel(**_HEADS_OF_26, fused=True),
        "gptneox": SmallModel(dim=128, kv_heads=4, rope_dims=8, output_type="Q8_0", fused=True),
        "gptneox, blocks in sequence": SmallModel(
            layers=3, dim=96, kv_heads=4, head_dim=24, output_type="Q8_0", parallel=False, fused=True
        ),
        "starcoder2": SmallModel(dim=128),
        "starcoder2, windows": SmallModel(dim=128, window=16),
        "phi2": SmallModel(dim=128, kv_heads=4, rope_dims=12, vocab=323, output_type="Q8_0"),
        "phi2, heads of 26": SmallModel(**_HEADS_OF_26, rope_dims=12),
        "stablelm": SmallModel(dim=128, rope_dims=8, output_type="Q8_0"),
        "stablelm, biases": SmallModel(dim=128, rope_dims=8, output_type="Q8_0", qkv_bias=True),
        "cohere2": SmallModel(layers=5, dim=128, window=16, scales=(("logit_scale", 0.25),)),
        "lfm2": SmallModel(layers=4, dim=128, rope_base=1e6, conv_layers=(0, 1, 3)),
        "lfm2, attention last": SmallModel(layers=3, dim=96, head_dim=24, conv_layers=(0, 1)),
        "lfm2, four taps, odd dimensions": replace(_ODD, layers=3, conv_layers=(0, 2), conv_taps=4),
        "mamba2": _MAMBA2,
        "mamba2, three groups, odd dimensions": replace(
            _MAMBA2,
            dim=36,
            embedding="F16",
            output_type="F32",
            types={"*": "F32"},
            scan=ScanShape(inner=72, state=20, heads=6, groups=3, taps=3),
        ),
        "granitehybrid": SmallModel(
            layers=4,
            dim=128,
            scan=ScanShape(inner=256, state=32, heads=8, layers=(0, 1, 3)),
            scales=_GRANITE_SCALES,
        ),
        "granitehybrid, attention last": SmallModel(
            layers=3,
            dim=96,
            head_dim=24,
            qkv_bias=True,
            scan=ScanShape(inner=192, state=16, heads=4, groups=2, layers=(0, 1)),
        ),
        "falcon-h1": SmallModel(
            layers=3,
            dim=128,
            output_type="Q8_0",
            rope_base=1e11,
            scan=ScanShape(inner=192, state=32, heads=6, norm=False),
        ),
        "falcon-h1, norms in groups": SmallModel(
            dim=96,
            output_type="Q8_0",
            heads=3,
            kv_heads=1,
            rope_base=1e11,
            scan=ScanShape(inner=256, state=48, heads=4, groups=2),
        ),
        "qwen35": _QWEN35,
        # These layers have no fixed interval.
        "qwen35, attention first and last": replace(
            _QWEN35, scan=ScanShape(inner=64, state=32, heads=2, layers=(1, 2))
        ),
        "qwen35, recurrence last": SmallModel(
            layers=3,
            heads=2,
            kv_heads=1,
            rope_dims=8,
            types={"*": "Q4_0", "*.ssm_alpha.*": "F32", "*.ssm_beta.*": "F32", "*.attn_gate.*": "Q8_0"},
            scan=ScanShape(inner=256, state=64, heads=4, groups=2, taps=3, layers=(0, 2)),
        ),
        "qwen35, odd dimensions": replace(
            _ODD,
            layers=3,
            rope_dims=6,
            scan=ScanShape(inner=216, state=20, heads=6, groups=2, layers=(0, 1)),
        ),
        "gemma2": SmallModel(
            layers=3,
            window=16,
            head_dim=64,
            scales=(("attn_logit_softcapping", 2.0), ("final_logit_softcapping", 6.0)),
        ),
        "gemma2, usual limits, odd dimensions": replace(_ODD, window=9),
        "gemma3": SmallModel(layers=7, rope_base=1e6, window=16, head_dim=64),
        "gemma3, scaled": SmallModel(layers=7, window=16, rope_scaling="linear"),
        "gemma4": _GEMMA4,
        "gemma4, odd dimensions": replace(
            _ODD,
            layers=6,
            heads=6,
            kv_heads=2,
            head_dim=40,
            rope_base=1e6,
            window=9,
            layered=LayerShape(2, 24, 3, inputs=10, shared=3, shared_ffn=140),
        ),
        "gemma4, equal feed-forwards": replace(
            _GEMMA4,
            heads=8,
            window=100,
            scales=(),
            layered=LayerShape(3, 32, 4, inputs=64, shared=1, shared_ffn=96),
        ),
        # All layers' heads are equal, and differ from the model's.
        "gemma4, windows alone": replace(
            _GEMMA4, layers=2, layered=LayerShape(3, 32, 1, inputs=32, shared_ffn=192)
        ),
        # The activation is then a separate dispatch, with the width of the layer.
        "gemma4, gate and up of two types": replace(_GEMMA4, types={"*": "Q4_0", "*.ffn_up.*": "Q8_0"}),
        "gemma4, without inputs": replace(_GEMMA4, layers=3, layered=LayerShape(3, 32, 2)),
        "gemma4, wide heads": replace(
            _GEMMA4,
            layers=4,
            heads=2,
            head_dim=512,
            layered=LayerShape(2, 256, 1, inputs=32, shared=2, shared_ffn=192),
        ),
        **EXPERTS,
    }
)
MODELS = {**_LLAMAS, **_OTHERS}

# Models for embeddings and classes that the peers support, with all matrices in float32.
_IN_FLOAT32 = SmallModel(types={"*": "F32"}, embedding="F32")
_GEMMA_EMBEDDING = replace(_IN_FLOAT32, layers=7, rope_base=1e6, window=16, head_dim=64, pooling="mean")
EMBEDDERS = _named(
    {
        "qwen3, last": replace(_IN_FLOAT32, head_dim=64, pooling="last"),
        "qwen3, mean": replace(_IN_FLOAT32, head_dim=64, pooling="mean"),
        "llama, mean": replace(_IN_FLOAT32, pooling="mean"),
        "gemma-embedding": replace(_GEMMA_EMBEDDING, dense=96),
        "gemma-embedding, without dense layers": _GEMMA_EMBEDDING,
    }
)
# Models without an output projection, with bidirectional attention.
_ENCODER = SmallModel(tokenizer="bert", vocab=400, pooling="mean", context=512, dim=96, heads=3, kv_heads=3)
_MODERN_BERT = replace(_ENCODER, tokenizer="gpt2", layers=5, window=32, fused=True)
_JINA = replace(_ENCODER, heads=6, kv_heads=6, head_dim=16, fused=True)
_JINA_CODE = replace(_JINA, tokenizer="gpt2", all_norms=True)
_PRIVACY_FILTER = replace(
    _ENCODER, tokenizer="gpt2", kv_heads=1, all_biases=True, window=33, experts=ExpertShape(4, 4, 64)
)
ENCODERS = _named(
    {
        "bert": replace(_ENCODER),
        "bert, float32": replace(_ENCODER, types={"*": "F32"}, embedding="F32"),
        "bert, 16-bit floats": replace(_ENCODER, types={"*": "F16", "*.ffn_up.*": "BF16"}),
        "bert, cls": replace(_ENCODER, pooling="cls", layers=3),
        "bert, position bias": replace(_ENCODER, position_bias=True),
        "bert, narrow embedding": replace(_ENCODER, embedding_dim=64),
        "bert, heads of 26": replace(_ENCODER, **_HEADS_OF_26),
        "deberta": replace(_ENCODER, architecture="deberta-v2", relative_rows=40),
        "deberta, heads of 26": replace(
            _ENCODER, architecture="deberta-v2", relative_rows=40, **_HEADS_OF_26
        ),
        "nomic-bert": replace(_ENCODER, rope_base=1000.0, fused=True),
        "nomic-bert, biases": replace(_ENCODER, qkv_bias=True, all_biases=True, fused=True),
        "jina-bert-v2": _JINA,
        "jina-bert-v2, heads of 26": replace(_JINA, **_HEADS_OF_26),
        "jina-bert-v2, code": _JINA_CODE,
        "jina-bert-v2, code, separate": replace(
            _JINA_CODE, fused=False, layers=1, heads=4, kv_heads=4, head_dim=32
        ),
        "modern-bert": replace(_MODERN_BERT, rope_base=160000.0),
        "modern-bert, heads of 26": replace(_MODERN_BERT, rope_base=160000.0, **_HEADS_OF_26),
        "eurobert": replace(_ENCODER, tokenizer="gpt2", kv_heads=1),
        # Each token uses all experts: with fewer bits, the choice of experts might differ.
        "privacy-filter, all experts": _PRIVACY_FILTER,
        "privacy-filter, rope factors": replace(
            _PRIVACY_FILTER, rope_scaling="llama3", window=129, kv_heads=3
        ),
        "privacy-filter, odd dimensions": replace(
            _PRIVACY_FILTER,
            dim=60,
            head_dim=10,
            types={"*": "F32"},
            embedding="F16",
            experts=ExpertShape(3, 3, 44),
        ),
    }
)
CLASSIFIERS = _named(
    {
        "qwen3, three classes": replace(
            _IN_FLOAT32, head_dim=64, pooling="rank", labels=("low", "middle", "high")
        ),
        "qwen3, yes and no": replace(_IN_FLOAT32, head_dim=64, pooling="rank", labels=("yes", "no")),
        "qwen3, one class": replace(_IN_FLOAT32, head_dim=64, pooling="rank", labels=("score",)),
    }
)


def write(path: str | Path, model: SmallModel) -> Path:
    """Write the file of a model; equal models have equal files."""
    key = repr(model)
    if key not in _contents:
        if len(_contents) == MOST_KEPT:
            del _contents[next(iter(_contents))]
        _contents[key] = _content(model)
    Path(path).write_bytes(_contents[key])
    return Path(path)


# Recently used files: making one takes 10 ms, and consecutive tests share models.
MOST_KEPT = 64
_contents: dict[str, bytes] = {}


def _content(model: SmallModel) -> bytes:
    # Attention scores have a deviation of 2; all layers together add as much as the embedding.
    residual = 2 * model.dim**-0.5 * model.layers**-0.5
    listed = _tensors.tensors(model, "F32", model.embedding, scores=1.4, residual=residual)
    tensors = [_tensors.with_types(t, model.types if _is_of_layer(t) else {}) for t in listed]
    # The recorded results of llama.cpp and transformers depend on this order of random numbers: first the
    # tensors outside the layers, then each layer's matrices, norms and biases.
    rng = np.random.default_rng(model.seed)
    data = {tensor.name: _data(rng, tensor) for tensor in sorted(tensors, key=_turn)}
    if model.layered is not None:  # transformers supports only these factors
        count = next(tensor.count for tensor in tensors if tensor.role is Role.FACTORS)
        data["rope_freqs.weight"] = model.layered.factors(count).view(np.uint8)
    if model.fused:
        tensors = _tensors.stacked(tensors, model)
        for whole, parts in _tensors.stacks(model):
            if parts[0] in data:
                data[whole] = np.concatenate([data.pop(part) for part in parts])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        _file.write(path, "Small", model, "F32", tensors, (data[tensor.name] for tensor in tensors))
        return path.read_bytes()


def _is_of_layer(tensor: Tensor) -> bool:
    """Return whether `SmallModel.types` apply to a tensor: not to routers, which files never quantize."""
    return tensor.name.startswith(("blk.", "per_layer_")) and "ffn_gate_inp" not in tensor.name


# Norms in the order in which their numbers are drawn.
_NORMS = (
    *("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"),
    *("attn_output_norm", "layer_output_norm", "ssm_norm", "attn_norm_2"),
)
# Order of tensors outside the layers; -2 for the others.
_FIRST = {"token_embd.weight": -5, "output_norm.weight": -4, "output.weight": -3, "attn_rel_b.weight": -1}
_OUTSIDE = _FIRST | dict.fromkeys(("dense_2.weight", "dense_3.weight", "cls.output.weight"), 1 << 20)
_ROLES = (Role.MATRIX, Role.NORM, Role.BIAS, Role.FILTER, Role.DECAY, Role.STEP, Role.ROWS, Role.SMALL_NORM)


def _turn(tensor: Tensor) -> tuple[int, ...]:
    """Return a sort key for the order of drawing random numbers; equal keys keep the order of the file."""
    if not tensor.name.startswith("blk."):
        return (_OUTSIDE.get(tensor.name, -2),)
    _, layer, *names = tensor.name.split(".")
    place = _NORMS.index(names[0]) if tensor.role is Role.NORM and names[0] in _NORMS else 0
    return (int(layer), _ROLES.index(tensor.role), place)


def _data(rng: np.random.Generator, tensor: Tensor) -> npt.NDArray[np.uint8]:
    if tensor.role is Role.FACTORS:  # as in Llama 3: fast pairs keep their frequency, slow ones are divided
        last = 2.0 if "short" in tensor.name else 8.0
        return np.geomspace(1.0, last, tensor.count, dtype=np.float32).view(np.uint8)
    if tensor.role is Role.ROWS:
        return _tensors.rows_of_distances(40, tensor.count).view(np.uint8)
    return _tensors.draw(rng, tensor)


def with_tokenizer_of(path: Path, model: SmallModel, other: Path) -> Path:
    """Write the file of a model with the tokenizer and the chat template of another file."""
    parts = take_apart(write(path, model))
    parts.metadata = [entry for entry in parts.metadata if not entry[0].startswith(b"tokenizer.")]
    parts.metadata += [entry for entry in take_apart(other).metadata if entry[0].startswith(b"tokenizer.")]
    return parts.write(path)


def write_with_nan(path: Path, model: SmallModel, token: int) -> Path:
    """Write a model in which the embedding of a token is NaN."""
    plain, rows = write(path.with_suffix(".plain"), replace(model, embedding="F32")), (model.vocab, -1)
    return with_tensor(path, plain, "token_embd.weight", lambda v: v.reshape(rows)[token].fill(np.nan))


def with_tensor(path: Path, plain: Path, name: str, change: Callable[[Any], None]) -> Path:
    """Write a copy of a file with changed values of a float32 tensor."""
    content = bytearray(plain.read_bytes())
    found = next(t for t in GGUFReader(plain).tensors if t.name == name)
    values = np.frombuffer(content, "<f4", int(found.n_elements), int(found.data_offset))
    change(values)
    del values
    path.write_bytes(content)
    return path


def page_bytes(path: Path, device: str) -> int:
    """Return the bytes of K and V of a page of a model."""
    with Model(path, device=device) as model:
        return int(model.stats()["kv_page_bytes"])
