"""Saved sessions with a few errors."""

import json
import struct
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np

from metal_prefill.storage import _session_file
from support.files.json_mutator import changed


def mutate_state(plain: bytes, random: Random) -> bytes:
    """Change fields of the header or bytes of the rest; often with a matching checksum."""
    (length,) = struct.unpack_from("<Q", plain)
    header, body = json.loads(plain[8 : 8 + length]), bytearray(plain[8 + length :])
    odd: list[Any] = [0, -1, 2**63, 1.5, "x", None, [], {}, [0, 1], True, "F16", "I64", [[[]]], 10**30]
    for _ in range(random.choice((0, 1, 1, 2))):
        header = changed(header, random, odd)
    for _ in range(random.choice((0, 0, 1, 8))):
        body[random.randrange(len(body))] = random.randrange(256)
    with suppress(Exception):  # a header without a computable checksum keeps the old one
        metadata = header["__metadata__"]
        tensors = {k: v for k, v in header.items() if k != "__metadata__"}
        if random.random() < 0.7:
            slices = {k: slice(*v["data_offsets"]) for k, v in tensors.items()}
            arrays = {k: np.frombuffer(bytes(body[s]), np.uint8) for k, s in slices.items()}
            metadata["checksum"] = _session_file._checksum(arrays, metadata)
    raw = bytearray(json.dumps(header).encode())
    for _ in range(random.choice((0, 0, 0, 2))):
        raw[random.randrange(len(raw))] = random.randrange(256)
    stated = random.choice((len(raw),) * 9 + (2**64 - 1, 0, len(raw) + 1))
    content = struct.pack("<Q", stated) + raw + body
    return bytes(content[: random.randrange(len(content))] if random.random() < 0.1 else content)
