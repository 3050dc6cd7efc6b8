"""Writer of GGUF files: the gguf package's, with faster lists, and a check of its headers."""

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np

from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._metadata_keys import ID_KEYS, LABEL_ENCODER
from metal_prefill.files._model_tensors import collect_tensors
from metal_prefill.files._task_config import read_head

_FORMATS = {int: "i", float: "f"}
# Name, shape, type and size in bytes.
OutlinedTensor: TypeAlias = tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]


class GGUFWriter(gguf.GGUFWriter):  # type: ignore[misc]
    """Writes the same files as the gguf package's class, which packs the items of lists one by one."""

    def add_model(self, name: str, tensor_type: str) -> None:
        """Add the name of a model, and the type of most of its tensors."""
        self.add_name(name)
        known = gguf.LlamaFileType.__members__
        forms = ("ALL_{}", "MOSTLY_{}", "MOSTLY_{}_S", "MOSTLY_{}_MOE")
        names = [form.format(tensor_type) for form in forms]
        self.add_file_type(int(next((known[n] for n in names if n in known), gguf.LlamaFileType.GUESSED)))
        self.add_quantization_version(gguf.GGML_QUANT_VERSION)

    def write_header(self, path: str | os.PathLike[str], tensors: Iterable[OutlinedTensor]) -> None:
        """Write everything except the values of tensors, for which the file has room."""
        sizes = []
        for name, shape, kind, nbytes in tensors:
            self.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
            sizes.append(nbytes)
        self.write_header_to_file(Path(path))
        self.write_kv_data_to_file()
        self.write_ti_data_to_file()
        assert self.fout is not None
        self.flush()
        aligned = (-(-size // self.data_alignment) for size in (self.fout[0].tell(), *sizes))
        os.truncate(path, sum(aligned) * self.data_alignment)

    def add_value(self, key: str, value: Any) -> None:
        """Add a value, or a list of values, of the type that files usually use."""
        kinds = gguf.GGUFValueType
        kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}.get(type(value))
        if kind is None:
            self.add_array(key, value)
        else:
            self.add_key_value(key, value, kind)

    def add_vocabulary(self, vocabulary: Any) -> None:
        """Add the tokens of a vocabulary, their merges or scores, and the ids of special ones."""
        self.add_tokenizer_model(vocabulary.model)
        self.add_tokenizer_pre(vocabulary.pre)
        self.add_token_list(vocabulary.tokens)
        self.add_token_types(vocabulary.types)
        if vocabulary.scores:
            self.add_token_scores(vocabulary.scores)
        if vocabulary.merges:
            self.add_token_merges(vocabulary.merges)
        for name, i in vocabulary.ids.items():
            self.add_uint32(f"tokenizer.ggml.{ID_KEYS[name]}_token_id", i)

    def _pack_val(self, val: Any, vtype: gguf.GGUFValueType, add_vtype: bool, **more: Any) -> bytes:
        if vtype is gguf.GGUFValueType.ARRAY and set(more.values()) <= {None} and (packed := _packed(val)):
            return (struct.pack("<I", vtype) if add_vtype else b"") + packed
        return bytes(super()._pack_val(val, vtype, add_vtype, **more))


def check_header(path: Path) -> None:
    """Read a header like that of a model to open, so that its errors precede the writing of values."""
    with GGUFFile(path) as opened:
        labels = opened.inner(LABEL_ENCODER)
        for model in (labels, opened) if labels.tensors else (opened,):
            config = read_config(model)
            collect_tensors(model, config)
            read_head(model, config.architecture, config.dim)


def _packed(values: Any) -> bytes | None:
    """Return the type of the items of a list, their number and their bytes; None for other values."""
    kinds = set(map(type, values if isinstance(values, list) else ()))
    if isinstance(values, bytes):  # a character map of SentencePiece has hundreds of thousands
        return struct.pack("<IQ", gguf.GGUFValueType.UINT8, len(values)) + values if values else None
    if kinds == {str}:
        number = struct.Struct("<Q").pack
        texts = [text.encode("utf-8") for text in values]
        items = b"".join([part for text in texts for part in (number(len(text)), text)])
    elif kinds in ({int}, {float}):
        items = struct.pack(f"<{len(values)}{_FORMATS[type(values[0])]}", *values)
    else:
        return None
    return struct.pack("<IQ", gguf.GGUFValueType.get_type(values[0]), len(values)) + items
