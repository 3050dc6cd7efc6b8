"""The import path of ``quantize_embeddings`` in sentence-transformers' documentation."""

from metal_prefill.sentence_transformers.util import quantize_embeddings as quantize_embeddings
