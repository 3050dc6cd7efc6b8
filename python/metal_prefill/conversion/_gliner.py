"""Folders of GLiNER (arXiv:2311.08526): ``gliner_config.json`` describes an encoder and the head after it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from metal_prefill.conversion._folder import GLINER, LABELS_TOKENIZER, Fields
from metal_prefill.conversion._folder_vocabulary import WrittenVocabulary
from metal_prefill.conversion._modules import Modules
from metal_prefill.conversion._torch_file import read_torch_file
from metal_prefill.conversion._vocabulary import TOKENIZER_FILES
from metal_prefill.conversion._weights import FILE, PICKLED, Weight, read_weights
from metal_prefill.files._entity_head import DIRECTIONS, PROJECTION, RECURRENCE, EntityMode
from metal_prefill.files._metadata_keys import ENTITY_KEYS
from metal_prefill.files._task_config import DENSE

# Classes of encoders by type, and the field that limits texts if there are no embeddings of positions.
_CLASSES = {
    "albert": "AlbertModel",
    "bert": "BertModel",
    "camembert": "CamembertModel",
    "deberta-v2": "DebertaV2Model",
    "distilbert": "DistilBertModel",
    "electra": "ElectraModel",
    "eurobert": "EuroBertModel",
    "modernbert": "ModernBertModel",
    "mpnet": "MPNetModel",
    "mt5": "T5EncoderModel",
    "roberta": "RobertaModel",
    "t5": "T5EncoderModel",
    "xlm-roberta": "XLMRobertaModel",
}
_TOKENS_PER_WORD = 4  # assumed by such encoders
_BODY, _LABELS = "token_rep_layer.bert_layer.model.", "token_rep_layer.labels_encoder.model."
_LABELS_PROJECTION = "token_rep_layer.labels_projection"
_EMBEDDINGS = ("word_embeddings.weight", "tok_embeddings.weight", "shared.weight", "embed_tokens.weight")
_ADDED = "[FLERT]"  # precedes the tokens of labels and of the separator if the library adds them


def _pairs(names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of two layers with an activation between them."""
    return {
        f"{module}.{place}": f"entities.{name}.{i}"
        for module, name in names.items()
        for i, place in enumerate((0, 3))
    }


_LAYERS: dict[EntityMode, dict[str, str]] = {
    "spans": _pairs(
        {
            "span_rep_layer.span_rep_layer.project_start": "start",
            "span_rep_layer.span_rep_layer.project_end": "end",
            "span_rep_layer.span_rep_layer.out_project": "span",
            "prompt_rep_layer": "label",
        }
    ),
    "words": {
        "scorer.proj_token": "entities.word",
        "scorer.proj_label": "entities.label",
        **_pairs({"scorer.out_mlp": "score"}),
    },
}
_OF_RECURRENCE = tuple(f"{layer}.{end}" for layer in RECURRENCE for end in ("weight", "bias"))
_MODES: dict[str, EntityMode] = {"markerV0": "spans", "token_level": "words"}


@dataclass
class Encoder:
    config: Fields
    place: Path  # folder with its tokenizer
    # In a folder of GLiNER, the encoder's tensors, and the tensors and metadata of the head.
    weights: dict[str, Weight] | None = None
    modules: Modules | None = None
    # Tokens before a label, and between labels and text, if texts follow labels; all tokens that the library
    # adds to a tokenizer without them; and the id of the first, -1 if the folder states none.
    spellings: tuple[str, ...] = ()
    added_tokens: tuple[str, ...] = ()
    stated_id: int = -1

    def tokens_of(self, vocabulary: WrittenVocabulary) -> dict[str, int]:
        """Return the ids of `spellings`, by their full keys."""
        ids = [vocabulary.by_text[text] for text in self.spellings]
        if ids and self.stated_id not in (-1, ids[0]):
            raise self.config.error(
                f"class_token_index is {self.stated_id}, but the token {self.spellings[0]} is {ids[0]}"
            )
        return {f"{ENTITY_KEYS}{name}": i for name, i in zip(("label_token", "separator"), ids, strict=False)}


class _Names(NamedTuple):
    """Names of fields and folders that describe an encoder."""

    config: str  # field with its configuration
    model: str  # field with its name
    tokenizer: str  # folder with its tokenizer inside the model's folder
    body: str  # prefix of its tensors


_ENCODERS = {
    "texts": _Names("encoder_config", "model_name", "", _BODY),
    "labels": _Names("labels_encoder_config", "labels_encoder", LABELS_TOKENIZER, _LABELS),
}


def lacking_encoders(folder: Path) -> dict[str, str]:
    """Return the encoders whose configuration or tokenizer is not in a folder of GLiNER.

    The keys are ``"texts"`` and ``"labels"``, the values names.
    """
    settings = Fields.read(folder / GLINER)
    found = {
        key: settings.string(names.model, default="")
        for key, names in _ENCODERS.items()
        if not (_config_of(folder, settings, names) and _has_tokenizer(folder / names.tokenizer))
    }
    return {key: name for key, name in found.items() if name}


def _config_of(folder: Path, settings: Fields, names: _Names) -> Fields | None:
    """Return the configuration of an encoder; None if the folder lacks it."""
    if settings.has(names.config):
        return settings.object(names.config)
    path = folder / names.tokenizer / "config.json"
    return Fields.read(path) if path.is_file() else None


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def read_gliner(folder: Path, encoders: Mapping[str, Path]) -> tuple[Encoder, Encoder | None]:
    """Return the encoder of texts, with the head as its modules, and the encoder of labels, or None.

    A missing configuration or tokenizer is read from the folders `encoders`, by the keys of
    `lacking_encoders`.
    """
    settings = Fields.read(folder / GLINER)
    for name in ("labels_decoder", "relations_layer"):
        settings.require(name, (None, ""), None)
    settings.require("words_splitter_type", ("whitespace",), "whitespace")
    settings.require("subtoken_pooling", ("first",), "first")
    settings.require("post_fusion_schema", ("",), "")
    for name in ("fuse_layers", "represent_spans", "precomputed_prompts_mode"):
        settings.require(name, (False,), False)
    settings.require("num_rnn_layers", (0, 1), 1)
    mode = _MODES[settings.choice("span_mode", known=_MODES, default="markerV0")]
    separate = settings.string("labels_encoder", default="") != ""
    # In models with two encoders, the library also makes a recurrence, but does not apply it.
    recurrent = not separate and settings.integer("num_rnn_layers", default=1, least=0) > 0
    found, labels = Modules(), Modules()
    found.set_pooling("none")
    labels.set_pooling("mean")  # after the projection; the result is the same as before it
    bodies: dict[str, dict[str, Weight]] = {_BODY: {}, _LABELS: {}}
    for weight in _weights(folder):
        body = next((prefix for prefix in bodies if weight.name.startswith(prefix)), None)
        module, _, end = weight.name.rpartition(".")
        if body is not None and (separate or body == _BODY):
            name = weight.name.removeprefix(body)
            bodies[body][name] = replace(weight, name=name)
        elif separate and module == _LABELS_PROJECTION:
            labels.tensors[f"{DENSE[0]}.{end}"] = weight
        elif not (separate and module == "rnn.lstm"):
            role = _role(mode, weight.name)
            if role is None or (role in _OF_RECURRENCE and not recurrent):
                raise weight.error(f"is not part of a model of {settings.path}")
            found.tensors[role] = weight
    if recurrent and (missing := next((role for role in _OF_RECURRENCE if role not in found.tensors), None)):
        raise settings.error(f"num_rnn_layers is 1, but the weights lack that of {missing} (rnn.lstm)")
    found.own = {
        f"{ENTITY_KEYS}mode": mode,
        f"{ENTITY_KEYS}most_words": settings.integer("max_len", default=384),
    }
    if mode == "spans":
        found.own[f"{ENTITY_KEYS}span_words"] = settings.integer("max_width", default=12)
    if not separate:
        found.own[f"{ENTITY_KEYS}reads_names"] = not settings.boolean("embed_ent_token", default=True)
    spellings = () if separate else (("ent_token", "<<ENT>>"), ("sep_token", "<<SEP>>"))

    def read(key: str, modules: Modules) -> Encoder:
        weights = bodies[_ENCODERS[key].body]
        return _encoder(folder, encoders.get(key), settings, key, weights, modules)

    texts, reads_labels = read("texts", found), read("labels", labels) if separate else None
    texts.spellings = tuple(settings.string(name, default=text) for name, text in spellings)
    texts.added_tokens = (_ADDED, *texts.spellings) if texts.spellings else ()
    texts.stated_id = settings.integer("class_token_index", default=-1, least=-1)
    return texts, reads_labels


def _weights(folder: Path) -> Iterable[Weight]:
    """Return the weights of a folder, which may only have a file of ``torch.save``."""
    pickled = folder / PICKLED[0]
    alone = pickled.is_file() and not (folder / FILE).is_file()
    return (read_torch_file(pickled) if alone else read_weights(folder)).values()


def _role(mode: EntityMode, name: str) -> str | None:
    """Return the name of a tensor of the head in a GGUF file."""
    module, _, suffix = name.rpartition(".")
    if module == "rnn.lstm":  # weight_ih_l0 multiplies the input, weight_hh_l0_reverse the state
        kind, part, *direction = suffix.replace("_l0", "").split("_")
        parts = {"ih": "input", "hh": "state"}
        if kind not in ("weight", "bias") or part not in parts or direction not in ([], ["reverse"]):
            return None
        return f"entities.{DIRECTIONS[len(direction)]}.{parts[part]}.{kind}"
    known = {"token_rep_layer.projection": PROJECTION, **_LAYERS[mode]}
    return f"{known[module]}.{suffix}" if module in known and suffix in ("weight", "bias") else None


def _encoder(
    folder: Path, other: Path | None, settings: Fields, key: str, weights: dict[str, Weight], modules: Modules
) -> Encoder:
    """Return an encoder; its configuration has its class and the size of its vocabulary."""
    names = _ENCODERS[key]
    config = _config_of(folder, settings, names)
    if config is None and other is not None:
        config = Fields.read(other / "config.json")
    if config is None:
        name = settings.string(names.model, default="the encoder")
        raise settings.error(
            f"{names.config} is missing: name a folder with config.json and the tokenizer of {name} as "
            f"encoders[{key!r}], or save the model by "
            "gliner.GLiNER.from_pretrained(...).save_pretrained(folder)"
        )
    kind = config.choice("model_type", known=_CLASSES, default="deberta-v2")
    table = next((weight for name, weight in weights.items() if name.endswith(_EMBEDDINGS)), None)
    if table is None or len(table.shape) != 2:
        raise settings.error(f"the weights lack the embedding of tokens ({names.body}...)")
    values: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": table.shape[0],
    }
    room = _TOKENS_PER_WORD * settings.integer("max_len", default=384)
    if kind in ("t5", "mt5"):
        values["n_positions"] = max(config.integer("n_positions", default=512), room)
    elif kind == "deberta-v2" and not config.boolean("position_biased_input", default=True):
        positions = config.integer("max_position_embeddings", default=512)
        values["max_position_embeddings"] = max(positions, room)
        if config.values.get("max_relative_positions", -1) == -1:
            values["max_relative_positions"] = positions
    own = folder / names.tokenizer
    place = own if other is None or _has_tokenizer(own) else other
    return Encoder(Fields(config.path, {**config.values, **values}), place, weights, modules)
