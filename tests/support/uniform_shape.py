"""Shapes of models without a file, for the cost model."""

from gguf import GGMLQuantizationType

from metal_prefill.files import ModelConfig
from metal_prefill.files._model_tensors import expected_tensors
from metal_prefill.gpu._cost_model.shapes import Shape, TensorShape


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
