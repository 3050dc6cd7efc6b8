"""Folders of GLiNER (arXiv:2311.08526): ``gliner_config.json`` describes an encoder and the head after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metal_prefill.conversion._body import GLINER
from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._folder_vocabulary import FolderVocabulary
from metal_prefill.conversion._modules import Modules
from metal_prefill.conversion._torch_file import read_torch_file
from metal_prefill.conversion._vocabulary import TOKENIZER_FILES
from metal_prefill.conversion._weights import Weight, listed_tensors, source_files
from metal_prefill.errors import GGUFError
from metal_prefill.files._entity_head import DIRECTIONS, PROJECTION, RECURRENCE, EntityMode
from metal_prefill.files._metadata_keys import ENTITY_KEYS

# Classes of encoders by their type, and the field that bounds texts of those without embeddings of positions.
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
_TOKENS_PER_WORD = 4  # for which such encoders have room
_BODY = "token_rep_layer.bert_layer.model."
_EMBEDDINGS = ("word_embeddings.weight", "tok_embeddings.weight", "shared.weight", "embed_tokens.weight")
_ADDED = "[FLERT]"  # precedes the tokens of labels and of the separator where the library adds them


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
class EntityFolder:
    """Contents of a folder."""

    config: Fields  # configuration of the encoder
    place: Path  # folder with the tokenizer
    weights: dict[str, Weight]  # tensors of the encoder
    modules: Modules  # tensors and metadata of the head
    spellings: tuple[str, str]  # tokens before a label, and between labels and text
    stated_id: int  # id of the first of these; -1 if the folder states none

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Tokens that the library adds to a tokenizer that lacks them."""
        return _ADDED, *self.spellings

    def tokens_of(self, vocabulary: FolderVocabulary) -> dict[str, int]:
        """Return the ids of `spellings`, by their full keys."""
        names = ("label_token", "separator")
        ids = [vocabulary.by_text[text] for text in self.spellings]
        if self.stated_id not in (-1, ids[0]):
            raise self.config.error(
                f"class_token_index is {self.stated_id}, but the token {self.spellings[0]} is {ids[0]}"
            )
        return {f"{ENTITY_KEYS}{name}": i for name, i in zip(names, ids, strict=True)}


def lacking_encoder(folder: Path) -> str:
    """Return the name of the encoder of a folder of GLiNER that lacks its configuration or tokenizer.

    It is empty if there is no such folder, or if it lacks neither.
    """
    if not (folder / GLINER).is_file():
        return ""
    settings = Fields.read(folder / GLINER)
    complete = settings.has("encoder_config") or (folder / "config.json").is_file()
    return "" if complete and _has_tokenizer(folder) else settings.string("model_name", default="")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def read_gliner(folder: Path, encoder: Path | None = None) -> EntityFolder:
    """Read the configuration and list the weights of a folder.

    The configuration and the tokenizer that it lacks are those in the folder of the encoder.
    """
    settings = Fields.read(folder / GLINER)
    for name in ("labels_encoder", "labels_decoder", "relations_layer"):
        settings.require(name, (None, ""), None)
    settings.require("span_mode", tuple(_MODES), "markerV0")
    settings.require("words_splitter_type", ("whitespace",), "whitespace")
    settings.require("subtoken_pooling", ("first",), "first")
    settings.require("post_fusion_schema", ("",), "")
    for name in ("fuse_layers", "represent_spans", "precomputed_prompts_mode"):
        settings.require(name, (False,), False)
    settings.require("num_rnn_layers", (0, 1), 1)
    mode = _MODES[settings.string("span_mode", default="markerV0")]
    recurrent = settings.integer("num_rnn_layers", default=1, least=0) > 0
    found, body = Modules(), {}
    found.set_pooling("none")
    for weight in _weights(folder):
        if weight.name.startswith(_BODY):
            name = weight.name.removeprefix(_BODY)
            body[name] = replace(weight, name=name)
            continue
        role = _role(mode, weight.name)
        if role is None or (role in _OF_RECURRENCE and not recurrent):
            raise GGUFError(f"{weight.file}: tensor {weight.name} is not part of a model of {settings.path}")
        found.tensors[role] = weight
    if recurrent and (missing := next((role for role in _OF_RECURRENCE if role not in found.tensors), None)):
        raise settings.error(f"num_rnn_layers is 1, but the weights lack that of {missing} (rnn.lstm)")
    found.own = {
        f"{ENTITY_KEYS}mode": mode,
        f"{ENTITY_KEYS}most_words": settings.integer("max_len", default=384),
        f"{ENTITY_KEYS}reads_names": not settings.boolean("embed_ent_token", default=True),
    }
    if mode == "spans":
        found.own[f"{ENTITY_KEYS}span_words"] = settings.integer("max_width", default=12)
    spellings = tuple(
        settings.string(f"{name}_token", default=text)
        for name, text in (("ent", "<<ENT>>"), ("sep", "<<SEP>>"))
    )
    stated = settings.integer("class_token_index", default=-1, least=-1)
    places = [folder] if encoder is None else [folder, encoder]
    return EntityFolder(
        _encoder(places, settings, body),
        next((place for place in places if _has_tokenizer(place)), folder),
        body,
        found,
        (spellings[0], spellings[1]),
        stated,
    )


def _weights(folder: Path) -> Iterator[Weight]:
    for file in source_files(folder):
        yield from listed_tensors(file) if file.suffix == ".safetensors" else read_torch_file(file).values()


def _role(mode: EntityMode, name: str) -> str | None:
    """Return the name of a tensor of the head in a GGUF file."""
    module, _, suffix = name.rpartition(".")
    if module == "rnn.lstm":  # weight_ih_l0 is that of the input, weight_hh_l0_reverse of the state
        kind, part, *direction = suffix.replace("_l0", "").split("_")
        parts = {"ih": "input", "hh": "state"}
        if kind not in ("weight", "bias") or part not in parts or direction not in ([], ["reverse"]):
            return None
        return f"entities.{DIRECTIONS[len(direction)]}.{parts[part]}.{kind}"
    known = {"token_rep_layer.projection": PROJECTION, **_LAYERS[mode]}
    return f"{known[module]}.{suffix}" if module in known and suffix in ("weight", "bias") else None


def _encoder(places: Sequence[Path], settings: Fields, weights: Mapping[str, Weight]) -> Fields:
    """Return the configuration of the encoder, with its class and the size of its vocabulary."""
    files = [place / "config.json" for place in places if (place / "config.json").is_file()]
    if not (files or settings.has("encoder_config")):
        name = settings.string("model_name", default="the encoder")
        raise settings.error(
            f"encoder_config is missing: name a folder with config.json and the tokenizer of {name} as "
            "encoder, or save the model by gliner.GLiNER.from_pretrained(...).save_pretrained(folder)"
        )
    config = settings.object("encoder_config") if settings.has("encoder_config") else Fields.read(files[0])
    kind = config.string("model_type", default="deberta-v2")
    if kind not in _CLASSES:
        raise config.unsupported(f"{config.name('model_type')} is {kind!r}; supported: {', '.join(_CLASSES)}")
    table = next((weight for name, weight in weights.items() if name.endswith(_EMBEDDINGS)), None)
    if table is None or len(table.shape) != 2:
        raise settings.error(f"the weights lack the embedding of tokens ({_BODY}...)")
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
    return Fields(config.path, {**config.values, **values})
