"""Model classes of transformers, and how each becomes an architecture of GGUF.

The differences are data: one row of `SOURCES` each. Names of tensors in the body of a model are those of
`gguf.TensorNameMap`; the rows add prefixes to remove and the names of heads.
"""

import re
from dataclasses import replace
from typing import Any

import gguf

from metal_prefill.conversion import _scan_settings, _settings
from metal_prefill.conversion._decoder_sources import DECODERS, GRANITE_HYBRID_EXPERTS, JINA_V5
from metal_prefill.conversion._encoder_sources import ENCODERS, NOMIC_BERT_MOE
from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._source import Source, Task
from metal_prefill.errors import UnsupportedModelError
from metal_prefill.files._architecture import ARCHITECTURES, MISSING_STEPS
from metal_prefill.files._task_config import DENSE

SOURCES = ENCODERS | DECODERS
# Suffixes of model classes, with the purpose of their heads.
TASKS: dict[str, Task] = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "tokens",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForConditionalGeneration": "causal",
    "ForMaskedLM": "body",
    "ForPreTraining": "body",
    "TextModel": "body",
    "EncoderModel": "body",
    "Model": "body",
}
# Stanford's ColBERT: the name of its class, and families by the type of its body.
COLBERT = "HF_ColBERT"
_BODIES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}
# Families of folders that name the class of another, whose positions they do not have.
_WITH_POSITIONS = {"alibi": "JinaBert", "rotary": "JinaEmbeddingsV3"}
BIDIRECTIONAL = "Bidirectional"  # ends the names of decoders whose tokens see those after them


def find_source(config: Fields) -> tuple[Source, Task]:
    """Return the row for a folder's model class, and the task of its head."""
    classes = config.sequence("architectures")
    name = classes[0] if classes and isinstance(classes[0], str) else None
    if name is None:
        raise config.error("architectures must name the class of the model, such as BertModel")
    positions = config.string("position_embedding_type", default="")
    if name == COLBERT:
        config.require("model_type", tuple(_BODIES), None)
        return SOURCES[_WITH_POSITIONS.get(positions, _BODIES[config.string("model_type")])], "late"
    match = re.fullmatch(rf"(.+?)({'|'.join(TASKS)})", name)
    family = match[1].removesuffix(BIDIRECTIONAL) if match else ""
    if family.lower() in MISSING_STEPS:
        raise config.unsupported(
            f"model class {name} is not supported; it needs {MISSING_STEPS[family.lower()]}"
        )
    if match is None or family not in SOURCES:
        known = ", ".join((*SOURCES, COLBERT))
        raise config.unsupported(f"model class {name} is not supported; supported families are {known}")
    source, task = SOURCES[family], TASKS[match[2]]
    if family == JINA_V5 and not config.boolean("is_decoder", default=True):
        source = SOURCES["EuroBert"]
    if ARCHITECTURES[source.architecture].causal and (
        family != match[1] or _is_bidirectional(source, config)
    ):
        source, task = _bidirectional(source), "body" if task == "causal" else task
    if source.architecture == "granitehybrid":
        has_experts = config.integer("num_local_experts", default=8, least=0) > 0
        source = GRANITE_HYBRID_EXPERTS if has_experts else source
        if _scan_settings.only_rotated_attention(config):
            source = replace(source, architecture="granitemoe" if has_experts else "granite")
    if source.architecture == "bert":
        source = SOURCES[_WITH_POSITIONS[positions]] if positions in _WITH_POSITIONS else source
    if source is SOURCES["NomicBert"] and config.integer("moe_every_n_layers", default=0, least=0) > 0:
        source = NOMIC_BERT_MOE
    has_other_parts = match[2] == "ForConditionalGeneration"
    if task not in ("body", *source.heads) or (has_other_parts and not source.text_part):
        raise config.unsupported(f"the head of {name} is not supported")
    return source, task


def text_fields(source: Source, config: Fields) -> Fields:
    """Return the part of a configuration that describes the text model."""
    part = source.text_part
    return config.object(part) if part and config.has(part) else config


def _is_bidirectional(source: Source, config: Fields) -> bool:
    """Return whether a folder states that tokens see those after them, where a row does not list values."""
    fields = {"use_bidirectional_attention": True, "is_causal": False}
    return any(
        config.boolean(name, default=not value) == value
        for name, value in fields.items()
        if name not in source.accepted
    )


def _bidirectional(source: Source) -> Source:
    """Return the row for a decoder whose tokens see those after them, and may be projected."""
    if source.architecture == "gemma3":
        return replace(source, architecture="gemma-embedding")
    return replace(
        source,
        architecture="llama-embed" if source.architecture == "llama" else source.architecture,
        constants={**source.constants, "attention.causal": False},
        heads={**source.heads, "body": {"linear": DENSE[0]}},
    )


def metadata_of(source: Source, config: Fields) -> dict[str, Any]:
    """Return the metadata of the architecture, without its prefix."""
    for name, accepted in source.accepted.items():
        config.require(name, accepted, accepted[0])
    is_causal = ARCHITECTURES[source.architecture].causal
    found: dict[str, Any] = ({} if is_causal else {"attention.causal": False}) | dict(source.constants)
    for suffix, key in source.keys.items():
        default: dict[str, Any] = {} if key.default is None else {"default": key.default}
        if key.default == 0 and not any(map(config.has, key.names)):
            continue
        if isinstance(key.default, float):
            found[suffix] = config.number(*key.names, default=key.default)
        else:
            found[suffix] = config.integer(*key.names, **default, most=key.most)
    if source.position_offset:
        found["context_length"] -= _settings.position_offset(config)
        if found["context_length"] < 1:
            raise config.error(
                f"max_position_embeddings is {config.integer('max_position_embeddings')}, must be more than "
                f"{_settings.position_offset(config)}, the first position"
            )
    return {**found, **source.more(config)}


def gguf_name(source: Source, task: Task, names: gguf.TensorNameMap, name: str) -> str | None:
    """Return the name of a tensor in a GGUF file, or None for a tensor that is left out."""
    if re.fullmatch(source.made, name):
        return name
    bare = name
    for prefix in source.prefixes:
        if bare.startswith(prefix):
            bare = bare.removeprefix(prefix)
            break
    stem, _, suffix = bare.rpartition(".")
    suffix = {"gamma": "weight", "beta": "bias"}.get(suffix, suffix)
    head = source.heads.get(task, {}).get(stem)
    if head is not None:
        return f"{head}.{suffix}"
    if any(re.fullmatch(pattern, bare) for pattern in source.unused):
        return None
    if suffix == "dt_bias":
        stem, suffix = f"{stem}.dt_proj", "bias"
    if suffix == "layer_scalar":
        stem, suffix = f"{stem}.layer_scalar", "weight"
    if suffix == "expert_bias":
        stem, suffix = f"{stem}.expert_bias", "bias"
    if source.added_prefix and not bare.startswith(source.added_prefix):
        stem = source.added_prefix + stem
    whole: str | None = names.get_name(f"{stem}.{suffix}")  # of a parameter without a suffix
    if whole is not None:
        return whole
    found: str | None = names.get_name(stem)
    if found is None or suffix not in ("weight", "bias"):
        raise UnsupportedModelError(f"tensor {name} is not part of a {source.architecture} model")
    return f"{found}.{suffix}"
