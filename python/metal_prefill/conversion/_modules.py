"""Modules after the body of a model: pooling, dense layers, classification heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._sources import Task
from metal_prefill.conversion._weights import Weight, read_module
from metal_prefill.errors import GGUFError
from metal_prefill.files._pooled_head import DENSE, POOLINGS, Pooling, Scores

# Fields of a pooling module's configuration; a folder sets one of them.
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_MODE_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last", "last": "last"}
# Functions of the single output of a cross-encoder, by the last part of the name of their class.
_OUTPUT_FUNCTIONS: dict[str, Scores] = {"Identity": "none", "Sigmoid": "sigmoid"}


@dataclass
class Modules:
    """Pooling, dense layers and heads of a folder.

    Attributes
    ----------
    metadata : dict
        Metadata, without the prefix of the architecture.
    tensors : dict
        Tensors, by their names in a GGUF file.
    skipped_words : list of str or None
        Tokens of documents that late interaction leaves out; None if no module lists them.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Weight] = field(default_factory=dict)
    skipped_words: list[str] | None = None

    @property
    def per_token(self) -> bool:
        """Whether dense layers project each token, as in models for late interaction."""
        return bool(self.tensors) and self.metadata.get("pooling_type") == POOLINGS.index("none")

    def set_pooling(self, pooling: Pooling) -> None:
        """Set the pooling."""
        self.metadata["pooling_type"] = POOLINGS.index(pooling)


def read_modules(folder: Path, config: Fields, task: Task) -> Modules:
    """Read the modules of sentence-transformers, and the labels of a classification head.

    Raises
    ------
    GGUFError
        A file is missing or damaged, or has a field of a wrong type.
    UnsupportedModelError
        A module, its activation or its pooling is not supported.
    """
    found = Modules()
    if task in ("sequence", "tokens"):
        _add_labels(found, config, task)
        return found
    path = folder / "modules.json"
    if not path.is_file():
        return found
    listing = Fields(path, {"modules": _read_listing(path)})
    pooled = False
    for module in listing.objects("modules"):
        kind = module.string("type").rpartition(".")[2]
        place = folder / _relative(module)
        if kind == "Pooling":
            found.set_pooling(_pooling_of(Fields.read(place / "config.json")))
            pooled = True
        elif kind == "Dense":
            _add_dense(found, place, config, pooled)
        elif kind == "Normalize":
            found.metadata["embedding_normalize"] = True
        elif kind == "MultiVectorMask":
            found.skipped_words = words_of(Fields.read(place / "config.json"))
        elif kind != "Transformer":
            raise module.unsupported(f"{module.name('type')} {kind} is not supported")
    if found.tensors and not pooled:  # late interaction: each token is projected
        found.set_pooling("none")
    return found


def words_of(config: Fields) -> list[str]:
    """Read the tokens that late interaction leaves out."""
    words = config.sequence("skiplist_words")
    if not all(isinstance(word, str) for word in words):
        raise config.error(f"{config.name('skiplist_words')} must contain strings")
    return words


def _read_listing(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise GGUFError(f"{path}: is not valid JSON: {error}") from None


def _relative(module: Fields) -> Path:
    """Return the folder of a module, which must be inside the folder of the model."""
    name = module.string("path", default="")
    place = Path(name)
    if place.is_absolute() or ".." in place.parts or "\0" in name:
        raise module.error(f"{module.name('path')} is {name!r}, must be a folder in this one")
    return place


def _pooling_of(config: Fields) -> Pooling:
    config.require("include_prompt", (True,), True)
    if config.has("pooling_mode"):
        mode = config.string("pooling_mode")
        if mode not in _MODE_NAMES:
            raise config.unsupported(
                f"pooling_mode is {mode!r}; supported: {', '.join(map(repr, _MODE_NAMES))}"
            )
        return _MODE_NAMES[mode]
    chosen = [name for name in config.values if name.startswith("pooling_mode_") and config.boolean(name)]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise config.unsupported(
            f"sets {', '.join(chosen) or 'no pooling_mode'}; supported is one of {', '.join(_MODES)}"
        )
    return _MODES[chosen[0]]


def _add_dense(found: Modules, place: Path, config: Fields, pooled: bool) -> None:
    """Add a dense layer; one before the pooling projects each token."""
    settings = Fields.read(place / "config.json")
    activation = settings.string("activation_function", default="Identity").rpartition(".")[2]
    if activation != "Identity":
        raise settings.unsupported(f"activation_function is {activation}; supported is Identity")
    index = len(found.tensors)
    if index == len(DENSE):
        raise settings.unsupported(f"is dense layer {index + 1}; supported are at most {len(DENSE)}")
    tensors = read_module(place)
    if set(tensors) != {"linear.weight"}:
        raise settings.unsupported(
            f"its layer has the tensors {', '.join(sorted(tensors))}; supported is linear.weight alone"
        )
    weight = tensors["linear.weight"]
    shape = (settings.integer("out_features"), settings.integer("in_features"))
    if weight.shape != shape:
        raise GGUFError(f"{weight.file}: tensor {weight.name} has shape {weight.shape}, expected {shape}")
    name = DENSE[index]
    found.tensors[f"{name}.weight"] = weight
    found.metadata |= {f"{name}_feat_out": shape[0], f"{name}_feat_in": shape[1]}
    if not pooled:
        found.metadata["embedding_length_out"] = shape[0]


def _add_labels(found: Modules, config: Fields, task: Task) -> None:
    found.set_pooling("rank" if task == "sequence" else "none")
    if task == "sequence":
        _add_scores(found, config)
    labels = _labels_of(config.object("id2label").values, config)
    # Labels that transformers makes up for a head that has none of its own are left out.
    if labels and labels != [f"LABEL_{i}" for i in range(len(labels))]:
        found.metadata["classifier.output_labels"] = labels


def _add_scores(found: Modules, config: Fields) -> None:
    """Add the state that a head for whole texts reads, and the function of its outputs."""
    if config.string("model_type", default="") == "modernbert":
        pooling = config.string("classifier_pooling", default="cls")
        if pooling not in ("cls", "mean"):
            raise config.unsupported(f"classifier_pooling is {pooling!r}; supported: 'cls', 'mean'")
        found.metadata["classifier.pooling_type"] = POOLINGS.index("cls" if pooling == "cls" else "mean")
    labels = len(config.object("id2label").values)
    problem = config.string("problem_type", default="")
    if problem == "regression" and labels > 1:
        raise config.unsupported(f"problem_type is {problem!r}, and its {labels} outputs are not classes")
    if problem == "multi_label_classification":
        found.metadata["classifier.activation"] = "sigmoid"
        return
    function = config.string("sbert_ce_default_activation_function", default="")
    function = config.object("sentence_transformers").string("activation_fn", default=function)
    name = function.rpartition(".")[2]
    if name in _OUTPUT_FUNCTIONS and labels == 1:
        found.metadata["classifier.activation"] = _OUTPUT_FUNCTIONS[name]
    elif name and name not in _OUTPUT_FUNCTIONS:
        raise config.unsupported(
            f"the activation of the output is {function}; supported: {', '.join(_OUTPUT_FUNCTIONS)}"
        )


def _labels_of(stated: Mapping[str, Any], config: Fields) -> list[str]:
    if set(stated) != {str(i) for i in range(len(stated))}:
        raise config.error(f"id2label must have a label for each number from 0, got {', '.join(stated)}")
    labels = [stated[str(i)] for i in range(len(stated))]
    if not all(isinstance(label, str) for label in labels):
        raise config.error("id2label must contain strings")
    return labels
