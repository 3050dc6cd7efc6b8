"""Shapes of models without a file, for the cost model."""

from gguf import GGMLQuantizationType

from metal_prefill.files import ModelConfig
from metal_prefill.files._model_tensors import expected_tensors
from metal_prefill.gpu._cost_model.shapes import Shape, TensorShape


def uniform_shape(
    config: ModelConfig,  # of the model
    # Tensor types in the layers, of the embedding and of the head; without `output` the head is tied.
    kind: str,
    embedding: str,
    output: str | None = None,
    *,
    optional: bool = False,  # whether the model has optional tensors of layers
) -> Shape:
    """Return the shape of a model whose layers have matrices of one type."""
    types = {"token_embedding": embedding, "output": output or embedding}
    tensors = []
    for spec, layer, presence in expected_tensors(config):
        has_types = spec.role == "token_types" and config.token_types
        if presence == "optional" and not (has_types or (optional and layer >= 0)):
            continue
        name = types.get(spec.role, kind if spec.kind in ("matrix", "experts") else "f32")
        tensors.append(TensorShape(spec.role, layer, GGMLQuantizationType[name.upper()], spec.shape))
    return Shape(config, tuple(tensors))
