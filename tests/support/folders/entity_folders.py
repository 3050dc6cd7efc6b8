"""Folders of GLiNER with random weights, and texts with entities recorded with its library."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from support.folders import encoder_folders, encoder_tokenizers, task_folders
from support.folders.model_folders import Folder, Shapes, filled, linear
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
# Arguments of calls, and thresholds by folder: between probabilities of the random weights.
CALLS: dict[str, dict[str, Any]] = {
    "flat": {},
    "several labels": {"multi_label": True},
    "nested": {"flat_ner": False},
    "nested, several labels": {"flat_ner": False, "multi_label": True},
}
THRESHOLDS = {
    "deberta": (0.945,),
    "deberta, listed": (0.54,),
    "bert": (0.95,),
    "bert, names": (0.97, 0.96, 0.973, 0.968),
    "bert, no recurrence": (0.984,),
    "bert, words": (0.385, 0.38, 0.388, 0.386),
    "deberta, words": (0.464,),
    "modernbert": (0.9,),
    "t5": (0.929,),
    "modernbert and bert": (0.93, 0.9, 0.95, 0.94),
    "deberta and bert, words": (0.28,),
}


class EntityFolder(Folder):
    """A folder with ``gliner_config.json``."""

    pickled = False  # whether `torch.save` wrote the weights

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


_GAIN = 1.2  # of matrices, some of which follow a ReLU


def _head(mode: str, width: int, dim: int, *, recurrent: bool) -> Shapes:
    """Return the shapes of the tensors after the encoder."""
    shapes: Shapes = {}
    if width != dim:
        shapes |= linear("token_rep_layer.projection", width, dim)
    for end in ("", "_reverse") if recurrent else ():
        shapes[f"rnn.lstm.weight_ih_l0{end}"] = (2 * width, width)
        shapes[f"rnn.lstm.weight_hh_l0{end}"] = (2 * width, width // 2)
        shapes |= {f"rnn.lstm.bias_{part}_l0{end}": (2 * width,) for part in ("ih", "hh")}
    if mode == "token_level":
        for name in ("token", "label"):
            shapes |= linear(f"scorer.proj_{name}", 2 * width, width)
        shapes |= linear("scorer.out_mlp.0", 4 * width, 3 * width) | linear("scorer.out_mlp.3", 3, 4 * width)
        return shapes
    span = "span_rep_layer.span_rep_layer."
    inputs = {
        f"{span}project_start": 1,
        f"{span}project_end": 1,
        f"{span}out_project": 2,
        "prompt_rep_layer": 1,
    }
    for name, factor in inputs.items():
        shapes |= linear(f"{name}.0", 4 * width, factor * width) | linear(f"{name}.3", width, 4 * width)
    return shapes


def entities(
    path: Path,
    body: Callable[[Path], Folder],
    width: int = 32,
    *,
    mode: str = "markerV0",
    tokenizer: str = "",  # variant of `encoder_tokenizers`; by default the one of the encoder's folder
    listed: bool = False,  # whether the tokenizer has the tokens of labels, which the library otherwise adds
    recurrent: bool = True,
    # Encoder of labels; by default, the encoder of texts.
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
    tensors = {BODY + name: tensor for name, tensor in folder.tensors.items()}
    table = next(
        name
        for name in tensors
        if name.endswith(("word_embeddings.weight", "tok_embeddings.weight", "shared.weight"))
    )
    dim = tensors[table].shape[1]
    tensors[table] = filled({table: (first + 3 * (labels is None), dim)})[table] * 4
    dim = folder.config.get("hidden_size") or dim
    tensors |= filled(_head(mode, width, dim, recurrent=recurrent), gain=_GAIN)
    for name in ("prompt_rep_layer.3.weight", "scorer.out_mlp.3.weight"):
        if name in tensors:  # makes probabilities differ in float32
            tensors[name] /= 4
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
            tensors |= filled(linear("token_rep_layer.labels_projection", width, size))
        settings |= {"labels_encoder": str(other.path), "labels_encoder_config": {**other.config}}
    return EntityFolder(path, settings, tensors)


def _modern(path: Path) -> Folder:
    folder = task_folders.modern_body(path, max_position_embeddings=300)
    return folder.merge("tokenizer_config.json", model_max_length=300)


_BERT = partial(encoder_folders.folder, name="bert")
_SMALL_BERT = partial(encoder_folders.folder, name="bert, small")
_DEBERTA = partial(encoder_folders.folder, name="deberta, 48 columns")
_T5 = partial(encoder_folders.folder, name="t5, two heads")

RECORDED: dict[str, Callable[[Path], EntityFolder]] = {
    "deberta": partial(entities, body=_DEBERTA, tokenizer="unigram"),
    "deberta, listed": partial(entities, body=_DEBERTA, width=48, listed=True),
    "bert": partial(entities, body=_BERT),
    "bert, names": partial(entities, body=_BERT, width=24, embed_ent_token=False),
    "bert, no recurrence": partial(entities, body=_BERT, recurrent=False),
    "bert, words": partial(entities, body=_BERT, mode="token_level", tokenizer="cased"),
    "deberta, words": partial(entities, body=_DEBERTA, mode="token_level", listed=True),
    "modernbert": partial(entities, body=_modern, listed=True),
    "t5": partial(entities, body=_T5),
    "modernbert and bert": partial(entities, body=_modern, labels=_SMALL_BERT),
    "deberta and bert, words": partial(
        entities, body=_DEBERTA, width=24, mode="token_level", labels=_SMALL_BERT
    ),
}


def calls_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of a folder's recorded calls: all calls for one folder of each mode."""
    thresholds = zip(CALLS, THRESHOLDS[name], strict=False)
    return {call: {**CALLS[call], "threshold": threshold} for call, threshold in thresholds}
