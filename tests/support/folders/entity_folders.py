"""Folders of GLiNER with random weights, and texts whose entities are recorded with its library."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from support.folders import encoder_folders, encoder_tokenizers, task_folders
from support.folders.encoder_folders import Size, linear_of
from support.folders.model_folders import Folder, Shapes, Values
from support.folders.torch_files import write_torch_file
from support.places import DATA

RECORD = DATA / "gliner_entities.json"
BODY, LABELS_BODY = (f"token_rep_layer.{name}.model." for name in ("bert_layer", "labels_encoder"))
LABELS = ["person", "place of birth", "Year", "person"]
TEXTS = [
    "Ada Lovelace was born in London in 1815.",
    "x",
    "Île-de-Ré, São  Paulo and state-of-the_art (2nd) e-mail: a@b.c!",
    " \n",
    "The king is dead. " * 2,
]
# Arguments of calls, and their thresholds by folder: between probabilities of the random weights.
CALLS: dict[str, dict[str, Any]] = {
    "flat": {},
    "several labels": {"multi_label": True},
    "nested": {"flat_ner": False},
    "nested, several labels": {"flat_ner": False, "multi_label": True},
}
THRESHOLDS = {
    "bert, names": (0.83, 0.66, 0.86, 0.68),
    "bert, words": (0.46, 0.455, 0.462, 0.45),
    "deberta, words": (0.3,),
    "modernbert and bert": (0.45, 0.45, 0.5, 0.5),
    "deberta and bert, words": (0.32,),
}


class EntityFolder(Folder):
    """A folder with ``gliner_config.json``."""

    pickled = False  # whether it has the weights as ``torch.save`` writes them

    def write(self, shards: int = 1) -> Path:
        """Write configuration and weights."""
        assert shards == 1
        (self.path / "config.json").unlink(missing_ok=True)
        self.json("gliner_config.json", self.config)
        if self.pickled:
            write_torch_file(self.path / "pytorch_model.bin", self.tensors)
        else:
            save_file(self.tensors, self.path / "model.safetensors")
        return self.path


def pickled(path: Path, name: str) -> EntityFolder:
    """Make a recorded folder whose weights `torch.save` wrote."""
    folder = RECORDED[name](path)
    folder.pickled = True
    return folder


def _head(mode: str, width: int, dim: int, *, recurrent: bool) -> Shapes:
    """Return the shapes of the tensors after the encoder."""
    shapes: Shapes = {}
    if width != dim:
        shapes |= linear_of({"token_rep_layer.projection": (width, dim)})
    for end in ("", "_reverse") if recurrent else ():
        shapes[f"rnn.lstm.weight_ih_l0{end}"] = (2 * width, width)
        shapes[f"rnn.lstm.weight_hh_l0{end}"] = (2 * width, width // 2)
        shapes |= {f"rnn.lstm.bias_{part}_l0{end}": (2 * width,) for part in ("ih", "hh")}
    if mode == "token_level":
        shapes |= linear_of({f"scorer.proj_{name}": (2 * width, width) for name in ("token", "label")})
        return shapes | linear_of(
            {"scorer.out_mlp.0": (4 * width, 3 * width), "scorer.out_mlp.3": (3, 4 * width)}
        )
    span = "span_rep_layer.span_rep_layer."
    inputs = {
        f"{span}project_start": 1,
        f"{span}project_end": 1,
        f"{span}out_project": 2,
        "prompt_rep_layer": 1,
    }
    for name, factor in inputs.items():
        shapes |= linear_of({f"{name}.0": (4 * width, factor * width), f"{name}.3": (width, 4 * width)})
    return shapes


def entities(
    path: Path,
    body: Callable[[Path], Folder],
    seed: int,
    width: int = 32,
    *,
    mode: str = "markerV0",
    tokenizer: str = "",  # variant of `encoder_tokenizers`; by default that of the encoder's folder
    listed: bool = False,  # whether the tokenizer has the tokens of labels, which the library adds otherwise
    recurrent: bool = True,
    # Encoder of labels; by default, that of texts reads them, too.
    labels: Callable[[Path], Folder] | None = None,
    **config: Any,
) -> EntityFolder:
    """Make a folder of GLiNER with an encoder."""
    folder = body(path)
    if tokenizer:
        encoder_tokenizers.write_recorded(path, tokenizer)
    content = folder.loaded("tokenizer.json")
    vocabulary = content["model"]["vocab"]
    known = {t if isinstance(t, str) else t[0] for t in vocabulary}
    first = len(known | {token["content"] for token in content["added_tokens"]})
    if listed:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"] += [
            {"id": first + i, "content": text, "special": True, **flags}
            for i, text in enumerate(("[FLERT]", "<<ENT>>", "<<SEP>>"))
        ]
        folder.json("tokenizer.json", content)
    rng = np.random.default_rng(seed)

    def drawn(shape: tuple[int, ...]) -> Values:
        return rng.normal(0, 0.3 if len(shape) == 1 else 1.3 * shape[1] ** -0.5, shape).astype(np.float32)

    tensors = {BODY + name: tensor for name, tensor in folder.tensors.items()}
    table = next(
        name
        for name in tensors
        if name.endswith(("word_embeddings.weight", "tok_embeddings.weight", "shared.weight"))
    )
    dim = tensors[table].shape[1]
    tensors[table] = drawn((first + 3 * (labels is None), dim)) * 3
    dim = folder.config.get("hidden_size") or dim
    shapes = _head(mode, width, dim, recurrent=recurrent)
    tensors |= {name: drawn(shape) for name, shape in shapes.items()}
    for name in ("prompt_rep_layer.3.weight", "scorer.out_mlp.3.weight"):
        if name in tensors:  # scores whose probabilities differ in float32
            tensors[name] = (tensors[name] / 4).astype(np.float32)
    settings = {
        "model_name": str(path),
        "encoder_config": {
            **folder.config,
            "architectures": None,
            "vocab_size": first + 3 if listed else first,
        },
        "span_mode": mode,
        "hidden_size": width,
        "max_width": 4,
        "max_len": 30,
        "num_rnn_layers": int(recurrent),
        "class_token_index": first + 1 if listed else -1,
        "vocab_size": first + 3 if listed else -1,
        **config,
    }
    if labels is not None:
        other = labels(path / "labels_tokenizer")
        tensors |= {LABELS_BODY + name: tensor for name, tensor in other.tensors.items()}
        size = other.config["hidden_size"]
        if size != width:
            layers = linear_of({"token_rep_layer.labels_projection": (width, size)})
            tensors |= {name: drawn(shape) for name, shape in layers.items()}
        settings |= {"labels_encoder": str(other.path), "labels_encoder_config": {**other.config}}
    return EntityFolder(path, settings, tensors)


def _modern(path: Path) -> Folder:
    folder = task_folders.modern_body(path, max_position_embeddings=300)
    return folder.merge("tokenizer_config.json", model_max_length=300)


_BERT = partial(encoder_folders.bert, seed=1, size=Size(32, 4, 64, 2))
_SMALL_BERT = partial(encoder_folders.bert, seed=4, size=Size(64, 2, 64, 1))
_DEBERTA = partial(encoder_folders.deberta, seed=2, size=Size(48, 4, 64, 2), buckets=16, furthest=64)
_T5 = partial(encoder_folders.t5, seed=3, size=Size(32, 2, 64, 2), width=16, act="gated-gelu")

RECORDED: dict[str, Callable[[Path], EntityFolder]] = {
    "deberta": partial(entities, body=_DEBERTA, seed=11, tokenizer="unigram"),
    "deberta, listed": partial(entities, body=_DEBERTA, seed=12, width=48, listed=True),
    "bert": partial(entities, body=_BERT, seed=13),
    "bert, names": partial(entities, body=_BERT, seed=14, width=24, embed_ent_token=False),
    "bert, no recurrence": partial(entities, body=_BERT, seed=15, recurrent=False),
    "bert, words": partial(entities, body=_BERT, seed=16, mode="token_level", tokenizer="cased"),
    "deberta, words": partial(entities, body=_DEBERTA, seed=17, mode="token_level", listed=True),
    "modernbert": partial(entities, body=_modern, seed=18, listed=True),
    "t5": partial(entities, body=_T5, seed=19),
    "modernbert and bert": partial(entities, body=_modern, seed=20, labels=_SMALL_BERT),
    "deberta and bert, words": partial(
        entities, body=_DEBERTA, seed=21, width=24, mode="token_level", labels=_SMALL_BERT
    ),
}


def calls_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of the calls that are recorded of a folder: all for one of each mode."""
    thresholds = THRESHOLDS.get(name, (0.4,))
    return {call: {**CALLS[call], "threshold": t} for call, t in zip(CALLS, thresholds, strict=False)}
