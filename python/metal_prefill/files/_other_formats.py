"""Files that are often mistaken for models, recognized by their first bytes."""

import re

RECOGNIZED_BYTES = 512

_SIGNATURES: tuple[tuple[bytes | tuple[bytes, ...], str], ...] = (
    (b"PK\x03\x04", "a ZIP archive or a PyTorch checkpoint: unpack the archive, or download a GGUF file"),
    (b"\x1f\x8b", "compressed by gzip: decompress it with gunzip"),
    ((b"tjgg", b"fmgg", b"lmgg"), "in a format older than GGUF: download a newer file of the model"),
)


def in_place_of_file(head: bytes) -> str | None:
    """Describe a download that replaced a file, from its first bytes; None if it may be the file."""
    if head.startswith(b"version https://git-lfs.github.com/"):
        size = re.search(rb"^size (\d+)$", head, flags=re.MULTILINE)
        of = f" of {int(size[1]):,} bytes" if size and len(size[1]) < 20 else ""
        return f"a Git LFS pointer to the file{of}: run `git lfs pull` in its repository"
    if re.match(rb"\s*<(!doctype|html|\?xml)", head, flags=re.IGNORECASE):
        return (
            "a web page: download the file itself, whose address on the Hub has /resolve/ in place of /blob/"
        )
    return None


def recognized(head: bytes) -> str | None:
    """Describe a file with these first bytes, and how to get the model instead; None if unknown."""
    if found := in_place_of_file(head):
        return found
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") < 1 << 30:
        return "a safetensors file: give its folder, which must contain config.json and the tokenizer"
    if re.match(rb"\s*\{", head):
        return "JSON text, such as a server's error message: download the file again"
    return next((what for signature, what in _SIGNATURES if head.startswith(signature)), None)
