"""Check of a SentencePiece character map before the tokenizers library uses it.

The library reads the map without checking its offsets, so that a damaged map ends in a Rust panic. A map is
the size of a trie in bytes, the trie, and replacement texts that end with NUL. The trie is a double array of
32-bit units, in blocks of 256: bit 31 marks a value; otherwise bits 0 to 7 are a label, bit 8 says that a
value follows, and the offset to the children is in bits 10 to 30, times 256 if bit 9 is set.
"""

import numpy as np

from metal_prefill.errors import GGUFError
from metal_prefill.files._gguf_file import GGUFFile

KEY = "tokenizer.ggml.precompiled_charsmap"
_BLOCK = 256  # units; the children of a node are in one block


def read_charsmap(gguf: GGUFFile) -> bytes | None:
    """Return the character map of a file, or None if it has none."""
    value = gguf.metadata.get(KEY)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.dtype.itemsize != 1 or value.dtype.kind not in "ui":
        raise GGUFError(f"{gguf.path}: {KEY} has type {gguf.metadata.type_name(KEY)}, expected array[uint8]")
    content = value.tobytes()
    problem = _problem_of(content) if content else None
    if problem is not None:
        raise GGUFError(f"{gguf.path}: {KEY} is damaged: {problem}")
    return content or None


def _problem_of(content: bytes) -> str | None:
    size = int.from_bytes(content[:4], "little")
    if len(content) < 4 or not 0 < size <= len(content) - 4 or size % (4 * _BLOCK):
        return f"its trie has {size} bytes, must have a multiple of {4 * _BLOCK}, at most {len(content) - 4}"
    units = np.frombuffer(content, "<u4", size // 4, 4).astype(np.int64)
    texts = np.frombuffer(content, np.uint8, offset=4 + size)
    try:
        content[4 + size :].decode()
    except UnicodeDecodeError as error:
        return f"replacement at byte {error.start} is not valid UTF-8"
    nodes = np.flatnonzero(units < 2**31)
    if units[0] >= 2**31:
        return "the root of its trie is a value"
    children = nodes ^ ((units[nodes] >> 10) << np.where(units[nodes] & 0x200, 8, 0))
    outside = np.flatnonzero(children >= len(units))
    if outside.size:
        return f"node {nodes[outside[0]]} of its trie leads to {children[outside[0]]}, of {len(units)}"
    # The value of a node is in the first of its children, and counts bytes of the replacement texts.
    values = units[children[(units[nodes] & 0x100) != 0]] & 0x7FFFFFFF
    starts = np.append(texts & 0xC0 != 0x80, True)  # whether a character begins, with the end of the texts
    wrong = values[(values >= len(starts)) | ~starts[np.minimum(values, len(texts))]]
    if wrong.size:
        return f"a value of its trie is {wrong[0]}, must begin a text in {len(texts)} bytes"
    return None
