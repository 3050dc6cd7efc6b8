"""Modules after the body of a model: pooling, dense layers, classification heads."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metal_prefill.conversion._decoder_sources import JINA_V5
from metal_prefill.conversion._folder import (
    STATIC,
    STATIC_CLASS,
    Fields,
    body_folder,
    is_number,
    modules_of,
    place_of,
    query_modules,
)
from metal_prefill.conversion._source import Task
from metal_prefill.conversion._torch_file import read_torch_file
from metal_prefill.conversion._weights import Weight, read_module
from metal_prefill.errors import GGUFError
from metal_prefill.files._metadata_keys import POOLING_KEY, POOLS_PROMPT_KEY
from metal_prefill.files._task_config import (
    DENSE,
    NORM,
    NORMALIZE,
    NUMBERED_POOLINGS,
    QUERY_WEIGHTS,
    TANH_INT8,
    TOKEN_VECTORS,
    TOKEN_WEIGHTS,
    TRANSITION_KEYS,
    VOCABULARY_POOLINGS,
    NumberedPooling,
    Pooling,
    Scores,
    TransitionBiases,
)

# Poolings of a module, by the name in its configuration, or by the name of the field that is set.
_MODES: dict[str, Pooling] = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weighted_mean",
    "lasttoken": "last",
}
_MODE_NAMES: dict[str, Pooling] = {
    **_MODES,
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "weightedmean": "weighted_mean",
    "last": "last",
}
# Poolings in configurations of bidirectional decoders.
_OF_CLASSES: dict[Any, NumberedPooling] = {"avg": "mean", "cls": "cls", "last": "last"}
# Classes of modules: their order without a pooling, and those that may follow a pooling in any order.
_OF_TOKENS = ("Transformer", "Dense", "Normalize", "MultiVectorMask")
_QUANTIZER = "FlexibleQuantizer"  # in pplx-embed's code
# Module of jina-embeddings; its adapter is chosen when a model is opened. In version 5 it also pools.
_CHOOSES_ADAPTER = "custom_st.Transformer"
_POOLS = ["task", "truncate_dim"]  # its arguments in version 5
_AFTER_POOLING = ("Dense", "LayerNorm", "Normalize", "Dropout", _QUANTIZER)
KINDS = (
    *_OF_TOKENS,
    *("LayerNorm", "Dropout", _QUANTIZER, "Pooling", "LogitScore", "SpladePooling"),
    STATIC,
    "SparseStaticEmbedding",
)
# Arguments of tokenizers and models in the settings of the module Transformer, and arguments without effect.
_ARGUMENTS = (
    *("model_args", "model_kwargs", "config_args", "config_kwargs"),
    *("tokenizer_args", "processor_kwargs", "processing_kwargs"),
)
_HARMLESS = (
    *("trust_remote_code", "torch_dtype", "dtype", "attn_implementation", "device_map", "revision"),
    *("use_fast", "use_safetensors", "low_cpu_mem_usage"),
    *("add_pooling_layer", "unpad_inputs", "use_memory_efficient_attention", "reference_compile"),
    *("model_max_length", "padding_side", "truncation_side"),
)
_LOGARITHMS = {"relu": 1, "log1p_relu": 2}  # number of logarithms in SPLADE
# Activations of dense layers, by the last part of the name of their class.
_ACTIVATIONS = {
    "Identity": "none",
    "Tanh": "tanh",
    "GELU": "gelu_erf",
    "ReLU": "relu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
# Functions of the single output of a cross-encoder, likewise.
_OUTPUT_FUNCTIONS: dict[str, Scores] = {"Identity": "none", "Sigmoid": "sigmoid"}


@dataclass
class Modules:
    """Pooling, dense layers and heads of a folder."""

    metadata: dict[str, Any] = field(default_factory=dict)  # metadata, without the prefix of the architecture
    own: dict[str, Any] = field(default_factory=dict)  # metadata of this project, by their full keys
    tensors: dict[str, Weight] = field(default_factory=dict)  # tensors, by their names in a GGUF file
    # Tokens of documents that late interaction skips; None if no module lists them.
    skipped_words: list[str] | None = None
    logit_score: Path | None = None  # folder of the module that scores a pair by the logits of two tokens
    masked: bool = False  # whether vectors are over the vocabulary, from the head that predicts masked tokens

    @property
    def per_token(self) -> bool:
        """Whether dense layers project each token, as in models for late interaction."""
        return bool(self.tensors) and self.metadata.get("pooling_type") == NUMBERED_POOLINGS.index("none")

    def set_pooling(self, pooling: Pooling) -> None:
        if pooling in NUMBERED_POOLINGS:
            self.metadata["pooling_type"] = NUMBERED_POOLINGS.index(pooling)
        else:
            self.own[POOLING_KEY] = pooling


def read_modules(folder: Path, config: Fields, task: Task) -> Modules:
    """Read the modules of sentence-transformers, and the labels of a classification head."""
    found = Modules()
    if task in ("sequence", "tokens"):
        _add_labels(found, folder, config, task)
        return found
    static = config.values.get("architectures") == [STATIC_CLASS]
    if static:
        found.set_pooling("mean")
    path = folder / "modules.json"
    if config.values.get("architectures") == [f"{JINA_V5}Model"] and _pools_itself(folder):
        found.set_pooling("last")
        found.metadata["embedding_normalize"] = True
        return found
    if not path.is_file():
        if static and config.boolean("normalize"):
            found.metadata["embedding_normalize"] = True
        if (stated := config.values.get("pooling")) in _OF_CLASSES:
            found.set_pooling(_OF_CLASSES[stated])
        return found
    listing, modules = Fields(path, {}), modules_of(folder)
    kinds = [_kind_of(module) for module in modules]
    queries = [_kind_of(module) for module in query_modules(folder)]
    if queries and (queries != ["SparseStaticEmbedding"] or "SpladePooling" not in kinds):
        raise listing.unsupported(
            f"queries have the modules {', '.join(queries)}, and documents {', '.join(kinds)}; supported are "
            "SparseStaticEmbedding, with a Transformer and SpladePooling for documents"
        )
    if task == "causal" and kinds == ["Transformer", "LogitScore"]:
        _check_transformer(folder, "text-generation")
        found.logit_score = folder / place_of(modules[1])
        return found
    if "SpladePooling" in kinds:
        _add_vocabulary_pooling(found, folder, config, listing, modules)
        return found
    _check_transformer(folder, "feature-extraction")
    _check_order(listing, kinds)
    # The feature that later modules read and replace: vectors of texts, or of tokens.
    feature = "sentence_embedding" if static or "Pooling" in kinds else "token_embeddings"
    steps: list[str] = []
    for module, kind in zip(modules, kinds, strict=True):
        place = folder / place_of(module)
        if kind == "Pooling":
            _add_pooling(found, Fields.read(place / "config.json"))
        elif kind == "Dense":
            steps.append(_add_dense(found, place, module, feature))
        elif kind == "LayerNorm":
            steps.append(_add_norm(found, place))
        elif kind == "Normalize":
            _check_feature(Fields.read_if_present(place / "config.json"), feature, "sentence_embedding")
            steps.append(NORMALIZE)
        elif kind == _QUANTIZER:
            steps.append(TANH_INT8)
        elif kind == "MultiVectorMask":
            settings = Fields.read(place / "config.json")
            settings.require("skiplist_tasks", (["document"], "document"), ["document"])
            settings.require("keep_only_token_ids", (None,), None)
            found.skipped_words = words_of(settings)
    if steps[-1:] == [NORMALIZE]:  # callers choose this step
        found.metadata["embedding_normalize"] = steps.pop() == NORMALIZE
    if any(step not in DENSE for step in steps):
        found.metadata["embedding_steps"] = steps
    if feature == "sentence_embedding":
        _add_token_heads(found, folder)
    if found.tensors and feature == "token_embeddings":
        found.set_pooling("none")
        stated = Fields.read_if_present(folder / "config_sentence_transformers.json")
        if stated.values.get("model_type") == "MultiVectorEncoder" and "Normalize" not in kinds:
            raise listing.unsupported(
                "modules have no Normalize; late interaction compares vectors of size 1"
            )
    return found


def _pools_itself(folder: Path) -> bool:
    """Return whether the class of a folder of jina-embeddings-v5 pools."""
    listed = modules_of(folder)
    return all(m.string("type") == _CHOOSES_ADAPTER and m.sequence("kwargs") == _POOLS for m in listed)


def _add_token_heads(found: Modules, folder: Path) -> None:
    """Add the heads of bge-m3, which modules do not list, if the folder has them."""
    paths = {name: folder / f"{name}_linear.pt" for name in (TOKEN_WEIGHTS, TOKEN_VECTORS)}
    for name, path in paths.items():
        if not path.is_file():
            continue
        tensors = read_torch_file(path)
        if set(tensors) != {"weight", "bias"}:
            raise GGUFError(f"{path}: has the tensors {', '.join(tensors)}, expected weight and bias")
        found.tensors |= {f"{name}.{end}": weight for end, weight in tensors.items()}


def _add_vocabulary_pooling(
    found: Modules, folder: Path, config: Fields, listing: Fields, modules: list[Fields]
) -> None:
    """Add the pooling of SPLADE (arXiv:2109.10086): logarithms of the positive logits of all tokens."""
    kinds = [_kind_of(module) for module in modules]
    if kinds != ["Transformer", "SpladePooling"]:
        raise listing.unsupported(f"modules are {', '.join(kinds)}; supported are Transformer, SpladePooling")
    _check_transformer(folder, "fill-mask")
    config.require("tie_word_embeddings", (True,), True)
    # Weights of tokens of queries, which need no forward pass (arXiv:2411.04403, section 3.2).
    for place in (folder / place_of(module) for module in query_modules(folder)):
        tensors = read_module(place)
        if set(tensors) != {"weight"}:
            raise GGUFError(f"{place}: has the tensors {', '.join(sorted(tensors))}, expected weight")
        found.tensors[QUERY_WEIGHTS] = tensors["weight"]
    settings = Fields.read(folder / place_of(modules[1]) / "config.json")
    pooling = settings.choice("pooling_strategy", known=VOCABULARY_POOLINGS, default="max")
    activation = settings.choice("activation_function", known=_LOGARITHMS, default="relu")
    found.masked = True
    found.metadata |= {"vocabulary_pooling": pooling, "vocabulary_logarithms": _LOGARITHMS[activation]}


def _kind_of(module: Fields) -> str:
    """Return the class of a module, without its package."""
    name = module.string("type").replace("MLMTransformer", "Transformer")  # the name in early folders
    package, _, kind = name.rpartition(".")
    if name == _CHOOSES_ADAPTER and module.sequence("kwargs") == ["task"]:
        return "Transformer"
    packages = ("st_quantize",) if kind == _QUANTIZER else ("sentence_transformers", "pylate")
    if package.split(".")[0] not in packages or kind not in KINDS:
        raise module.unsupported(f"{module.name('type')} {name} is not supported")
    return kind


def _check_order(listing: Fields, kinds: list[str]) -> None:
    """Raise an error unless modules are in the supported order."""
    first = next(
        first for first in (["Transformer", "Pooling"], [STATIC], []) if kinds[: len(first)] == first
    )
    if first or "Pooling" in kinds:
        known = bool(first) and set(kinds[len(first) :]) <= set(_AFTER_POOLING)
    else:
        order = [kind for kind in kinds if kind != "MultiVectorMask"]
        known = set(order) <= set(_OF_TOKENS) and order == sorted(order, key=_OF_TOKENS.index)
    if not known or kinds.count("Transformer") > 1:
        raise listing.unsupported(
            f"modules are {', '.join(kinds)}; supported are one Transformer and Pooling, or {STATIC}, then"
            f" any of {', '.join(_AFTER_POOLING)}; or a Transformer, Dense and Normalize of tokens"
        )


def _check_feature(config: Fields, feature: str, default: str) -> None:
    config.require("module_input_name", (feature,), default)
    config.require("module_output_name", (feature,), feature)


def transformer_settings(folder: Path) -> list[Fields]:
    """Read the settings of the module Transformer, whose file has one of several names."""
    return [Fields.read(path) for path in sorted(body_folder(folder).glob("sentence_*_config.json"))]


def _check_transformer(folder: Path, task: str) -> None:
    for module in transformer_settings(folder):
        module.require("transformer_task", (task,), task)
        if task == "feature-extraction":
            text = module.object("modality_config").object("text")
            text.require("method", ("forward",), "forward")
            text.require("method_output_name", ("last_hidden_state",), "last_hidden_state")
            module.require("module_output_name", ("token_embeddings",), "token_embeddings")
        for key in _ARGUMENTS:
            for name in module.object(key).values:
                if name not in _HARMLESS and (task, name) != ("text-generation", "chat_template"):
                    raise module.unsupported(f"{key}.{name} is not supported")


def words_of(config: Fields) -> list[str]:
    """Read the tokens that late interaction skips."""
    words = config.sequence("skiplist_words")
    if not all(isinstance(word, str) for word in words):
        raise config.error(f"{config.name('skiplist_words')} must contain strings")
    return words


def _add_pooling(found: Modules, config: Fields) -> None:
    if not config.boolean("include_prompt", default=True):
        found.own[POOLS_PROMPT_KEY] = False
    if config.has("pooling_mode"):
        found.set_pooling(_MODE_NAMES[config.choice("pooling_mode", known=_MODE_NAMES)])
        return
    known = {f"pooling_mode_{name}": pooling for name, pooling in _MODES.items()}
    chosen = [name for name in config.values if name.startswith("pooling_mode_") and config.boolean(name)]
    if len(chosen) != 1 or chosen[0] not in known:
        raise config.unsupported(
            f"sets {', '.join(chosen) or 'no pooling_mode'}; supported is one of {', '.join(known)}"
        )
    found.set_pooling(known[chosen[0]])


def _add_norm(found: Modules, place: Path) -> str:
    """Add a LayerNorm, and return the name of its step."""
    tensors = read_module(place)
    if f"{NORM}.weight" in found.tensors or tensors.keys() != {"norm.weight", "norm.bias"}:
        raise GGUFError(
            f"{place}: is a second LayerNorm, or has other tensors than norm.weight and norm.bias"
        )
    found.tensors |= {name.replace("norm", NORM): weight for name, weight in tensors.items()}
    return NORM


def _add_dense(found: Modules, place: Path, module: Fields, feature: str) -> str:
    """Add a dense layer, and return its name; without pooling, it projects each token."""
    settings = Fields.read(place / "config.json")
    pylate = module.string("type").startswith("pylate.")
    # The defaults of the classes.
    activation = settings.string("activation_function", default="Identity" if pylate else "Tanh")
    activation = activation.rpartition(".")[2]
    _check_feature(settings, feature, feature)
    settings.require("use_residual", (False,), False)
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise settings.unsupported(f"activation_function is {activation}; supported: {known}")
    index = sum(f"{name}.weight" in found.tensors for name in DENSE)
    if index == len(DENSE):
        raise settings.unsupported(f"is dense layer {index + 1}; supported are at most {len(DENSE)}")
    tensors = read_module(place)
    expected = {"linear.weight"} | ({"linear.bias"} if settings.boolean("bias", default=True) else set())
    if set(tensors) != expected:
        stated, needed = (", ".join(sorted(names)) for names in (tensors, expected))
        raise settings.error(f"its layer has the tensors {stated}; bias requires {needed}")
    shape = (settings.integer("out_features"), settings.integer("in_features"))
    tensors["linear.weight"].check_shape(shape)
    name = DENSE[index]
    found.tensors |= {own.replace("linear", name): weight for own, weight in tensors.items()}
    if _ACTIVATIONS[activation] != "none":
        found.metadata[f"{name}_activation"] = _ACTIVATIONS[activation]
    found.metadata |= {f"{name}_feat_out": shape[0], f"{name}_feat_in": shape[1]}
    if feature == "token_embeddings":
        found.metadata["embedding_length_out"] = shape[0]
    return name


def _add_labels(found: Modules, folder: Path, config: Fields, task: Task) -> None:
    found.set_pooling("rank" if task == "sequence" else "none")
    if task == "sequence":
        _add_scores(found, folder, config)
    else:
        _add_transitions(found, Fields.read_if_present(folder / "viterbi_calibration.json"))
    stated = config.object("id2label").values
    if set(stated) != {str(i) for i in range(len(stated))}:
        raise config.error(f"id2label must have a label for each number from 0, got {', '.join(stated)}")
    labels = [stated[str(i)] for i in range(len(stated))]
    if not all(isinstance(label, str) for label in labels):
        raise config.error("id2label must contain strings")
    # Omits labels that transformers generates, unless llama.cpp needs them to count outputs.
    if labels and (
        labels != [f"LABEL_{i}" for i in range(len(labels))] or (task == "sequence" and labels[1:])
    ):
        found.metadata["classifier.output_labels"] = labels


def _add_transitions(found: Modules, calibration: Fields) -> None:
    """Add the biases of transitions between tags that are not 0."""
    biases = calibration.object("operating_points").object("default").object("biases")
    known = {f"transition_bias_{name}": name for name in TransitionBiases._fields}
    for key, value in biases.values.items():
        if key not in known:
            raise biases.unsupported(f"{biases.name(key)} is not supported; known are {', '.join(known)}")
        if not is_number(value):
            raise biases.error(f"{biases.name(key)} is {value!r}, must be a finite number")
        if value:
            found.metadata[f"{TRANSITION_KEYS}{known[key]}"] = float(value)


def _add_scores(found: Modules, folder: Path, config: Fields) -> None:
    """Add the state that a head for whole texts reads, and the function of its outputs."""
    if config.string("model_type", default="") == "modernbert":
        pooling = config.choice("classifier_pooling", known=("cls", "mean"), default="cls")
        found.metadata["classifier.pooling_type"] = NUMBERED_POOLINGS.index(pooling)
    elif (stated := config.values.get("pooling")) in _OF_CLASSES:
        found.metadata["classifier.pooling_type"] = NUMBERED_POOLINGS.index(_OF_CLASSES[stated])
    labels = len(config.object("id2label").values)
    problem = config.string("problem_type", default="")
    if problem == "regression" and labels > 1:
        raise config.unsupported(f"problem_type is {problem!r}, and its {labels} outputs are not classes")
    if problem == "multi_label_classification":
        found.metadata["classifier.activation"] = "sigmoid"
        return
    function = _activation_of_module(folder)
    if not function:
        function = config.string("sbert_ce_default_activation_function", default="")
        function = config.object("sentence_transformers").string("activation_fn", default=function)
    name = function.rpartition(".")[2]
    # As in transformers, the identity of several classes means softmax.
    if name in _OUTPUT_FUNCTIONS and (labels == 1 or name != "Identity"):
        found.metadata["classifier.activation"] = _OUTPUT_FUNCTIONS[name]
    elif name and name not in _OUTPUT_FUNCTIONS:
        raise config.unsupported(
            f"the activation of the output is {function}; supported: {', '.join(_OUTPUT_FUNCTIONS)}"
        )


def _activation_of_module(folder: Path) -> str:
    """Return the activation that a cross-encoder with a list of modules states; empty without one."""
    path = folder / "modules.json"
    if not path.is_file():
        return ""
    listing, kinds = Fields(path, {}), [_kind_of(module) for module in modules_of(folder)]
    if kinds != ["Transformer"]:
        raise listing.unsupported(f"modules are {', '.join(kinds)}; supported with a classifier: Transformer")
    _check_transformer(folder, "sequence-classification")
    stated = Fields.read_if_present(folder / "config_sentence_transformers.json")
    default = stated.values.get("default_prompt_name")
    if default is not None and stated.object("prompts").values.get(default):
        raise stated.unsupported(f"default_prompt_name is {default!r}; a classifier has no prompts")
    return stated.string("activation_fn", default="")
