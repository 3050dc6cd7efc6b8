"""Conversion of a model folder of the Hugging Face Hub to a GGUF file."""

import importlib.metadata
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from metal_prefill._support.arguments import Progress
from metal_prefill._support.atomic_write import replacing
from metal_prefill._support.interruptions import whole_interruptions
from metal_prefill._support.messages import shortened
from metal_prefill.conversion._combined import STATIC_TABLE, adapted, static_table
from metal_prefill.conversion._decoder_sources import DECODERS
from metal_prefill.conversion._encoder_sources import ENCODERS
from metal_prefill.conversion._folder import (
    GLINER,
    STATIC,
    STATIC_CLASS,
    Fields,
    adapter_folder,
    body_folder,
    class_of,
    is_number,
    modules_of,
)
from metal_prefill.conversion._folder_vocabulary import WrittenVocabulary
from metal_prefill.conversion._gliner import Encoder, read_gliner
from metal_prefill.conversion._modules import Modules, read_modules
from metal_prefill.conversion._source import Source, Task, find_source
from metal_prefill.conversion._text_settings import (
    colbert_heads,
    colbert_metadata,
    max_tokens,
    prompt_metadata,
    rerank_metadata,
)
from metal_prefill.conversion._vocabulary import read_vocabulary
from metal_prefill.conversion._weights import FILE, Stack, Weight, divided, ignored_index, read_weights
from metal_prefill.errors import GGUFError, UnsupportedModelError
from metal_prefill.files._gguf_writer import GGUFWriter, check_header
from metal_prefill.files._metadata_keys import EXPANSION_KEYS, LABEL_ENCODER, LENGTH_KEYS, MAX_INT
from metal_prefill.files._task_config import HEAD_TENSORS

SOURCES = ENCODERS | DECODERS  # a row for each family of model classes
AUTO = "auto"
# Types that the gguf package can write; the last ones are for models that were trained for them.
TENSOR_TYPES = (AUTO, "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "TQ1_0", "TQ2_0")
_FALLBACK = "F16"  # for rows that no whole number of blocks fits
_OF_WEIGHTS = {"BF16": "BF16", "F16": "F16"}  # a folder's number types that AUTO keeps; others become F32
# Matrices that stay in float32, as in llama.cpp: they are added, not multiplied, or are small and come last.
_EXACT = {"position_embd.weight", "token_types.weight", *HEAD_TENSORS}
_EXACT_ENDS = (
    *("ffn_gate_inp.weight", "attn_rel_b.weight", "attn_rel_k.weight", "attn_rel_q.weight"),
    *("ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"),
)
_FILTERS = ("shortconv.conv.weight", "ssm_conv1d.weight")  # [channels, 1, taps] in a folder


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    blocks: Callable[[], Iterable[npt.NDArray[np.float32]]]  # function that returns the values, in blocks

    @property
    def nbytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return int(math.prod(self.shape) // block * size)


@whole_interruptions()
def convert(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    tensor_type: str = AUTO,
    name: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    encoders: Mapping[str, str | os.PathLike[str]] = MappingProxyType({}),
    progress: Progress | None = None,
) -> Path:
    """Write a model folder of the Hugging Face Hub as a GGUF file, which llama.cpp can read, too.

    Parameters
    ----------
    folder
        Folder with ``config.json``, weights in ``model.safetensors`` or the files that
        ``model.safetensors.index.json`` lists, and ``tokenizer.json`` or ``vocab.txt``. Pooling and dense
        layers are those of ``modules.json``, which may name a folder for the others (``0_Transformer``). A
        folder of GLiNER has ``gliner_config.json`` instead, and its weights may be in ``pytorch_model.bin``.
    path
        File to write. An existing file is replaced, atomically.
    tensor_type
        Type of the matrices, one of `TENSOR_TYPES`. ``"auto"`` keeps the 16-bit type of each, and selects F32
        for others. Rows that no whole number of blocks fits become F16. Vectors, positions and
        heads stay in F32.
    name
        Name of the model in the file; by default that of the folder.
    adapter
        Folder of a LoRA adapter (``adapter_config.json``, ``adapter_model.safetensors``) to merge into the
        weights, or the name of an adapter in the folder or within its weights, such as ``"retrieval"``.
    encoders
        Folders with the configuration and the tokenizer of an encoder, which a folder of GLiNER may lack:
        of that of ``"texts"``, and of that of ``"labels"`` in models with two encoders.
    progress
        Called with the number of bytes written and the number in total.

    Returns
    -------
    pathlib.Path
        `path`.

    Raises
    ------
    GGUFError
        A file of the folder is missing, damaged or contradicts another; or a tensor is missing, left over or
        has a wrong shape.
    UnsupportedModelError
        The model class or one of its features is not supported, or the weights are in another format than
        safetensors.
    ValueError
        `tensor_type` is unknown.
    OSError
        A file cannot be read or written.
    """
    if tensor_type not in TENSOR_TYPES:
        raise ValueError(f"tensor_type must be one of {', '.join(TENSOR_TYPES)}, got {tensor_type!r}")
    folder = Path(folder)
    if not folder.is_dir():
        problem = "is a file, not a model folder" if folder.exists() else "no such folder"
        raise GGUFError(f"{folder}: {problem}")
    adapter = adapter_folder(folder, None if adapter is None else Path(adapter))
    texts, labels = None, None
    if (folder / GLINER).is_file():
        texts, labels = read_gliner(folder, {key: Path(place) for key, place in encoders.items()})
    model = _Model(folder, texts or _encoder(folder), adapter)
    tensors = model.planned(tensor_type)
    writer = GGUFWriter(None, model.source.architecture)
    whole_name = os.fsencode(name or folder.resolve().name).decode("utf-8", "replace")
    writer.add_model(whole_name, _type_of(model.weights) if tensor_type == AUTO else tensor_type)
    model.add_metadata(writer, model.modules.own | model.settings())
    if labels is not None:
        inner = _Model(folder, labels)
        own = GGUFWriter(None, inner.source.architecture)
        inner.add_metadata(own, {})
        writer.kv_data[0] |= {f"{LABEL_ENCODER}{key}": value for key, value in own.kv_data[0].items()}
        tensors += [t._replace(name=f"{LABEL_ENCODER}{t.name}") for t in inner.planned(tensor_type)]
    _write(Path(path), folder, writer, tensors, progress)
    return Path(path)


def _encoder(folder: Path) -> Encoder:
    """Return the only model of a folder, which may be a table without layers (StaticEmbedding, model2vec)."""
    body = body_folder(folder)
    path = body / "config.json"
    kinds = list(map(class_of, modules_of(folder)))
    stated = Fields.read_if_present(path)
    if kinds[:1] != [STATIC] and (kinds or stated.values.get("model_type") != "model2vec"):
        return Encoder(Fields.read(path), body)
    table = static_table(stated, read_weights(body))[STATIC_TABLE]
    if len(table.shape) != 2:
        raise table.error(f"has shape {table.shape}, expected a matrix")
    values = {"architectures": [STATIC_CLASS], "vocab_size": table.shape[0], "hidden_size": table.shape[1]}
    normalize = not kinds and stated.boolean("normalize", default=False)
    return Encoder(Fields(body / FILE, {**values, "normalize": normalize}), body)


class _Model:
    """A model of a folder: its row, its configuration, and its tensors by their names in a GGUF file."""

    def __init__(self, folder: Path, encoder: Encoder, adapter: Path | None = None) -> None:
        whole = encoder.config
        _refuse_quantized(whole)
        self.source, task = find_source(SOURCES, whole)
        part = self.source.text_part
        self.config = config = whole.object(part) if part and whole.has(part) else whole
        self.metadata = self.source.metadata(config)  # without the prefix of the architecture
        modules, self.is_late = encoder.modules, task == "late"
        if modules is None and self.is_late:
            modules = Modules(colbert_heads(folder, config))
        self.modules = read_modules(folder, config, task) if modules is None else modules
        self.metadata |= self.modules.metadata
        self.task: Task = "masked" if self.modules.masked else task
        weights: Mapping[str, Weight]
        weights = read_weights(encoder.place) if encoder.weights is None else encoder.weights
        if adapter is not None or whole.has("lora_adaptations"):
            prefixes = (*self.source.prefixes, self.source.added_prefix)
            weights = adapted(whole, weights, adapter, prefixes)
        self.weights = self.source.combined(config, weights)
        self.tensors = self._by_role()
        tied = whole if whole.has("tie_word_embeddings") else config
        if (
            self.task == "causal"
            and "output.weight" not in self.tensors
            and not tied.boolean("tie_word_embeddings", default=True)
        ):
            name = tied.name("tie_word_embeddings")
            raise tied.error(f"{name} is false, but the weights lack lm_head.weight")
        self.vocabulary = read_vocabulary(
            encoder.place, config, frames=self.source.frames, added=encoder.added_tokens
        )
        self._folder, self._encoder = folder, encoder

    def _by_role(self) -> dict[str, Weight]:
        source, config = self.source, self.config
        names = gguf.get_tensor_name_map(_architecture(source), self.metadata.get("block_count", 0))
        found: dict[str, Weight] = dict(self.modules.tensors)
        for weight in divided(self.weights, source.parts):
            try:
                role = source.gguf_name(self.task, names, weight.name)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{weight.file}: {error}") from None
            if role is None:
                continue
            if role in found:
                raise GGUFError(
                    f"{weight.file}: tensors {found[role].name} and {weight.name} are both {role}"
                )
            for pattern, name in source.biases.items():  # which transformers ignores without these fields
                if re.fullmatch(rf"{pattern}\.bias", role) and not config.boolean(name, default=False):
                    raise config.error(f"{name} is not true, but the weights have the tensor {weight.name}")
            found[role] = weight
        return found

    def settings(self) -> dict[str, Any]:
        """Return prompts, lengths, the expansion of queries and tokens of labels, by their full keys."""
        folder, vocabulary = self._folder, self.vocabulary
        if self.is_late:
            found = colbert_metadata(folder, vocabulary)
        else:
            found = prompt_metadata(folder, self.modules, vocabulary)
        if self.modules.logit_score is not None:
            found |= rerank_metadata(folder, self.modules.logit_score, vocabulary)
        if self._encoder.modules is not None:
            return found | self._encoder.tokens_of(vocabulary)
        if "block_count" not in self.metadata:  # the tokenizer of a table cuts texts itself
            truncation = Fields.read(self._encoder.place / "tokenizer.json").object("truncation")
            if truncation.values:
                found[f"{LENGTH_KEYS}text"] = truncation.integer("max_length")
            return found
        if self.task != "causal" or (folder / "modules.json").is_file():
            expanded = found.get(f"{EXPANSION_KEYS}length", 0)
            found |= max_tokens(folder, self.metadata["context_length"], expanded)
        return found

    def planned(self, chosen: str) -> list[_Tensor]:
        """Return the tensors to write, with matrices of a type."""
        made = [_planned(self.source, self.config, *item, chosen) for item in self.tensors.items()]
        return made + [
            _Tensor(role, values.shape, GGMLQuantizationType.F32, partial(iter, [values]))
            for role, values in self.source.computed(self.config).items()
        ]

    def add_metadata(self, writer: GGUFWriter, extras: dict[str, Any]) -> None:
        """Add the metadata of the architecture, `extras` by their full keys, and the vocabulary."""
        own = {f"{self.source.architecture}.{suffix}": value for suffix, value in self.metadata.items()}
        for key, value in (own | extras).items():
            _add(writer, self._folder, key, value)
        add_vocabulary(writer, self.vocabulary, self.config)


def _refuse_quantized(config: Fields) -> None:
    """Refuse weights that are quantized already, by MLX or by a method of transformers."""
    for key in ("quantization", "quantization_config"):
        if not config.has(key):
            continue
        settings = config.values[key] if isinstance(config.values[key], dict) else {}
        method = str(
            settings.get("quant_method", "MLX" if "group_size" in settings else "an unknown method")
        )[:40]
        raise config.unsupported(
            f"the weights are quantized by {method} ({key}); open the original model, whose weights are "
            "BF16, F16 or F32, or a GGUF file of it"
        )


def _architecture(source: Source) -> Any:
    for architecture, name in gguf.MODEL_ARCH_NAMES.items():
        if name == (source.names_of or source.architecture):
            return architecture
    version = importlib.metadata.version("gguf")
    known = f"the gguf package {version} does not know {source.architecture}"
    raise UnsupportedModelError(f"{known}: pip install --upgrade gguf")


def _type_of(weights: Mapping[str, Weight]) -> str:
    """Return the type of most values of a file that holds the weights exactly."""
    counts: dict[str, int] = {}
    for weight in weights.values():
        counts[weight.dtype] = counts.get(weight.dtype, 0) + math.prod(weight.shape)
    return _OF_WEIGHTS.get(max(counts, key=lambda dtype: counts[dtype], default="F32"), "F32")


def _planned(source: Source, config: Fields, name: str, weight: Weight, chosen: str) -> _Tensor:
    shape = weight.shape
    is_filter = name.endswith(_FILTERS)
    if is_filter and len(shape) == 3 and shape[1] == 1:
        shape = (shape[0], shape[2])
    expected = (3,) if isinstance(weight, Stack) else (1, 2)
    if len(shape) not in expected or 0 in shape:
        dimensions = " or ".join(map(str, expected))
        raise weight.error(f"has shape {weight.shape}, expected {dimensions} dimensions, none of them 0")
    exact = len(weight.shape) == 1 or is_filter or name in _EXACT or name.endswith(_EXACT_ENDS)
    for pattern, change in source.changes.items():
        if re.fullmatch(pattern, name):
            assert not isinstance(weight, Stack), f"{name}: no change applies to matrices of experts"
            weight = change(config, name, weight)
            shape = shape if is_filter else weight.shape
    chosen = _OF_WEIGHTS.get(weight.dtype, "F32") if chosen == AUTO else chosen
    kind = GGMLQuantizationType["F32" if exact else chosen]
    if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = GGMLQuantizationType[_FALLBACK]
    return _Tensor(name, shape, kind, weight.blocks)


def _write(
    path: Path, folder: Path, writer: GGUFWriter, tensors: list[_Tensor], progress: Progress | None
) -> None:
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    with replacing(path) as part:
        try:
            writer.write_header(part, [(t.name, t.shape, t.kind, t.nbytes) for t in tensors])
            try:
                check_header(part)
            except (GGUFError, UnsupportedModelError) as error:
                message = str(error).removeprefix(f"{part}: ")
                raise type(error)(f"{folder}: {message}{ignored_index(folder)}") from None
            assert writer.fout is not None
            out = writer.fout[0]
            for tensor in tensors:
                writer.write_padding(out, out.tell())
                end = out.tell() + tensor.nbytes
                for block in tensor.blocks():
                    data = quants.quantize(np.ascontiguousarray(block), tensor.kind)
                    out.write(data.data)  # unlike tofile, whose errors do not name a full disk
                    done += data.nbytes
                    if progress is not None:
                        progress(done, total)
                assert out.tell() == end, f"{tensor.name} ends at byte {out.tell()}, expected {end}"
                writer.write_padding(out, tensor.nbytes)
        finally:
            writer.close()


def _add(writer: GGUFWriter, folder: Path, key: str, value: Any) -> None:
    values = value if isinstance(value, list) else [value]
    if len({type(v) for v in values}) != 1 or not all(map(_is_writable, values)):
        raise GGUFError(shortened(f"{folder}: {key} would be {value!r}, which a GGUF file cannot contain"))
    writer.add_value(key, value)


def _is_writable(value: Any) -> bool:
    if isinstance(value, float):
        return is_number(value)
    return isinstance(value, (bool, str)) or (isinstance(value, int) and 0 <= value <= MAX_INT)


def add_vocabulary(writer: GGUFWriter, vocabulary: WrittenVocabulary, config: Fields) -> None:
    writer.add_vocabulary(vocabulary)
    if vocabulary.charsmap:
        writer.add_precompiled_charsmap(vocabulary.charsmap)
    if config.has("type_vocab_size"):
        writer.add_token_type_count(config.integer("type_vocab_size", least=0))
    for name, value in vocabulary.flags.items():
        _add(writer, config.path.parent, f"tokenizer.ggml.{name}", value)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)
