"""Public names are stable; everything else has an underscore, or is in a private package."""

import importlib
import importlib.util
import pkgutil
from pathlib import Path

import metal_prefill
from metal_prefill import _core

# Modules and packages with the names that README, guide, benchmarking page and docstrings mention.
PUBLIC = {
    "metal_prefill": [*metal_prefill.__all__, "__version__"],
    "metal_prefill.bench": ["BenchError", "BenchResults", "Row", "ServingResults", "run", "run_serving"],
    "metal_prefill.chat": ["Conversation"],
    "metal_prefill.cli": ["main"],
    "metal_prefill.conversion": ["TENSOR_TYPES", "convert"],
    "metal_prefill.engine": ["resolve_device"],
    "metal_prefill.errors": [name for name in metal_prefill.__all__ if name.endswith("Error")],
    "metal_prefill.files": ["GGUFFile", "ModelConfig", "TensorInfo"],
    "metal_prefill.generation": ["Options", "Sampler", "Scheduler", "Stream"],
    "metal_prefill.gpu": [],
    "metal_prefill.hub": ["default_model_path", "fetch", "fetch_folder", "resolve_model"],
    "metal_prefill.integrations": [
        *("LangChainChat", "LangChainEmbeddings", "LangChainReranker", "LlamaIndexEmbeddings"),
        *("LlamaIndexLLM", "LlamaIndexReranker", "MetalPrefillLM"),
    ],
    "metal_prefill.lm_eval": ["MetalPrefillLM"],
    "metal_prefill.model": ["Model"],
    "metal_prefill.sentence_transformers": [
        *("CrossEncoder", "Encoder", "MultiVectorEncoder", "SentenceTransformer", "SimilarityFunction"),
        *("SparseEncoder", "quantize_embeddings"),
    ],
    "metal_prefill.sentence_transformers.cross_encoder": ["CrossEncoder"],
    "metal_prefill.sentence_transformers.quantization": ["quantize_embeddings"],
    "metal_prefill.sentence_transformers.sparse_encoder": ["SparseEncoder"],
    "metal_prefill.sentence_transformers.util": [
        *("cos_sim", "dot_score", "euclidean_sim", "manhattan_sim", "pairwise_cos_sim", "pairwise_dot_score"),
        *("pairwise_euclidean_sim", "pairwise_manhattan_sim", "normalize_embeddings", "truncate_embeddings"),
        *("community_detection", "paraphrase_mining", "paraphrase_mining_embeddings", "semantic_search"),
        *("SimilarityFunction", "maxsim", "maxsim_pairwise", "quantize_embeddings"),
    ],
    "metal_prefill.serve": ["Settings", "app"],
    "metal_prefill.session": ["Logits", "Piece", "Progress", "Session", "TokenIds"],
    "metal_prefill.storage": [],
    "metal_prefill.synth": [
        *("PRESETS", "TENSOR_TYPES", "ExpertShape", "LayerShape", "ModelShape", "ScanShape"),
        "synthesize",
    ],
    "metal_prefill.tasks": [
        *("PROMPTS", "Classification", "Entity", "HybridVectors", "Ranked", "SparseVector", "embed"),
        *("maxsim", "prompt_names", "rerank"),
    ],
    "metal_prefill.text": [
        *("ChatTemplate", "ParsedAnswer", "Tokenizer", "ToolCall", "ToolCallParser", "parse_tool_calls"),
        "tool_names",
    ],
}
# Names that need a package which is not a requirement.
EXTRAS = {
    "LangChainChat": "langchain_core",
    "LangChainEmbeddings": "langchain_core",
    "LangChainReranker": "langchain_core",
    "LlamaIndexEmbeddings": "llama_index",
    "LlamaIndexLLM": "llama_index",
    "LlamaIndexReranker": "llama_index",
    "MetalPrefillLM": "lm_eval",
}
PROGRAMS = {"metal_prefill.__main__", "metal_prefill.bench.__main__"}  # run by `python -m`


def test_public_names_are_stable() -> None:
    for module in PUBLIC:
        missing = {name for name, package in EXTRAS.items() if importlib.util.find_spec(package) is None}
        for name in set(PUBLIC[module]) - missing:
            assert hasattr(importlib.import_module(module), name)


def test_all_other_modules_are_private() -> None:
    found = {module.name for module in pkgutil.walk_packages(metal_prefill.__path__, "metal_prefill.")}
    open_names = {name for name in found if "._" not in name.removesuffix(".__main__")}
    open_names -= {name for name in found if name.startswith("metal_prefill.commands")}  # of the command line
    assert open_names == PUBLIC.keys() - {"metal_prefill"} | PROGRAMS


def test_the_package_contains_no_test_helpers() -> None:
    of_the_processor = {name for name in vars(_core.cpu) if not name.startswith("_")}
    expected = {
        "Workload", "built_sets", "kernel_sets", "pair_speedup", "peak_workload", "peaks", "use_pair_speedup",
    }  # fmt: skip
    assert of_the_processor == expected
    assert list(Path(metal_prefill.__file__).parent.glob("*_testing*")) == []
