"""Passes a model to the engines: its configuration, and its tensors by their roles."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from metal_prefill import _core
from metal_prefill._core import ModelConfig
from metal_prefill.files._architecture import ARCHITECTURES, Architecture
from metal_prefill.files._gguf_file import SUPPORTED_TYPES, GGUFFile, TensorInfo
from metal_prefill.files._metadata_keys import LABEL_ENCODER, Keys
from metal_prefill.files._task_config import HEAD_TENSORS

# Tensor types that are supported for matrices; vectors are F32.
MATRIX_TYPES = tuple(kind.name for kind in SUPPORTED_TYPES.values())


def collect_tensors(gguf: GGUFFile, config: ModelConfig) -> list[tuple[str, int, TensorInfo]]:
    """Find the tensor of every role, and check its shape and type.

    Returns roles, which are the rows of ``cpp/model/tensors.inc``, their layers, -1 outside the layers, and
    tensors. If the output projection is tied to the embedding, its role has the embedding's tensor. Raises
    GGUFError if a tensor is missing or contradicts the configuration, UnsupportedModelError if its type is
    not implemented, or it is not part of the architecture.
    """
    found = list(_find_tensors(gguf, config))
    used = {tensor.name for _, _, tensor in found} | HEAD_TENSORS | ignored_tensors(gguf, config).keys()
    for name in gguf.tensors:
        if name not in used and not name.startswith(LABEL_ENCODER):
            raise gguf.unsupported(
                f"tensor {name} is not part of a {config.architecture} model with {config.n_layers} layers"
            )
    return found


def ignored_tensors(gguf: GGUFFile, config: ModelConfig) -> dict[str, str]:
    """Return the tensors of a file that the text model does not use, with the purpose of each."""
    patterns = dict(ARCHITECTURES[config.architecture].ignored)
    for layer, other in enumerate(config.layer_cache):
        if other != layer:
            patterns |= {f"blk.{layer}.attn_{name}.*": "unused keys" for name in ("k", "v", "k_norm")}
    if ARCHITECTURES[config.architecture].ignored:
        last = range(config.n_layers, Keys(gguf).positive("block_count"))
        patterns |= {f"blk.{layer}.*": "multi-token prediction" for layer in last}
    found: dict[str, str] = {}
    for name in gguf.tensors:
        for pattern, purpose in patterns.items():
            if fnmatchcase(name, pattern):
                found[name] = purpose
                break
    return found


def expected_tensors(config: ModelConfig) -> Iterator[tuple[_core.TensorSpec, int, str]]:
    """Yield every tensor that a model can have: its table row, its layer and its presence.

    The presence is ``"required"``, ``"optional"``, or ``"tied"`` if the embedding can replace the tensor.
    """
    traits = ARCHITECTURES[config.architecture]
    specs = _core.tensors(config)
    # Whether the tensors of a role have other shapes in some layers.
    differ = config.layer_kv_heads or config.layer_head_dim or config.layer_ffn_dim
    for layer in range(-1, config.n_layers):
        if layer >= 0 and differ:
            specs = _core.tensors(config.of_layer(layer))
        for spec in specs:
            if layer >= 0 and not spec.is_in(config, layer):
                continue
            if spec.presence == "per_layer_inputs" and config.per_layer_dim == 0:
                continue
            presence = presence_of(spec.presence, traits)
            if spec.per_layer == (layer >= 0) and presence != "absent":
                yield spec, layer, presence


def presence_of(stated: str, traits: Architecture) -> str:
    """Return "required", "optional", "absent" or "tied" for the presence in a row of the table."""
    if stated in ("required", "optional"):
        return stated
    presence = getattr(traits, stated)
    assert isinstance(presence, str)
    return presence


def tensor_name(traits: Architecture, spec: _core.TensorSpec, layer: int) -> str:
    return traits.names.get(spec.role, spec.name).format(layer=layer)


def _find_tensors(gguf: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, int, TensorInfo]]:
    specs = _core.tensors(config)
    embedding = next(s.name for s in specs if s.role == "token_embedding")
    shapes = {spec.role: spec.shape for spec in specs}
    names = {spec.role: spec.name for spec in specs}
    traits = ARCHITECTURES[config.architecture]
    parts = {role: (name, roles) for name, roles in traits.fused.items() for role in roles}
    for spec, layer, presence in expected_tensors(config):
        if spec.role in parts:
            whole, roles = parts[spec.role]
            if f"blk.{layer}.{traits.reversed_with.get(whole)}" in gguf.tensors:
                roles = roles[::-1]
            whole = f"blk.{layer}.{whole}"
            separate = {names[role].format(layer=layer) for role in roles}
            if whole in gguf.tensors and not (separate - {whole}) & gguf.tensors.keys():
                yield spec.role, layer, _part(gguf, whole, {role: shapes[role] for role in roles}, spec.role)
                continue
        # Layers may share weights.
        own = layer % config.distinct_layers if config.distinct_layers and layer >= 0 else layer
        name = tensor_name(traits, spec, own)
        tensor = gguf.tensors.get(name)
        if tensor is not None:
            if spec.shape[0] == 1 and tensor.shape == spec.shape[1:]:  # a matrix of one row, as a vector
                tensor = replace(tensor, shape=spec.shape)
            is_any = spec.kind in ("matrix", "experts")
            _check_tensor(gguf, tensor, spec.shape, MATRIX_TYPES if is_any else ("F32",))
            yield spec.role, layer, tensor
        elif presence == "required":
            whole = f"blk.{layer}.{parts[spec.role][0]}" if spec.role in parts else name
            other = f", as is {whole}, which may contain it" if whole != name else ""
            raise gguf.error(f"tensor {name} is missing{other}")
        elif presence == "tied":
            yield spec.role, layer, gguf.tensors[embedding]


def _part(gguf: GGUFFile, name: str, shapes: Mapping[str, tuple[int, ...]], role: str) -> TensorInfo:
    """Return the rows of one role in a fused tensor that holds several roles in the order of `shapes`."""
    tensor = gguf.tensors[name]
    rows = {other: shape[0] for other, shape in shapes.items()}
    types = MATRIX_TYPES if len(shapes[role]) == 2 else ("F32",)
    _check_tensor(gguf, tensor, (sum(rows.values()), *shapes[role][1:]), types)
    row_bytes = tensor.nbytes // sum(rows.values())
    before = sum(rows[other] for other in list(rows)[: list(rows).index(role)])
    return replace(
        tensor, shape=shapes[role], offset=tensor.offset + before * row_bytes, nbytes=rows[role] * row_bytes
    )


def _check_tensor(gguf: GGUFFile, tensor: TensorInfo, shape: tuple[int, ...], types: tuple[str, ...]) -> None:
    if tensor.shape != shape:
        raise gguf.error(f"tensor {tensor.name} has shape {tensor.shape}, the metadata requires {shape}")
    if tensor.type_name not in types:
        raise gguf.unsupported(
            f"tensor {tensor.name} has type {tensor.type_name}; supported types are {', '.join(types)}"
        )
