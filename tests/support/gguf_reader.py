"""The reader of the gguf package, on a plain array."""

from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray


class GGUFReader(gguf.GGUFReader):  # type: ignore[misc]
    """Reads a file as the gguf package does, in less time.

    It takes a slice for each string of a vocabulary and for each number of an array, and slices of a memory
    map are slow.
    """

    @property
    def data(self) -> NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = np.asarray(mapped)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type == gguf.GGUFValueType.ARRAY:
            kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            number = self.gguf_scalar_to_np.get(gguf.GGUFValueType(kind[0]))
            if number is not None and length[0] > 0:
                values = self._get(orig_offs + 12, number, length[0])
                types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind[0])]
                parts = [kind, length, *values.reshape(-1, 1)]
                return 12 + values.nbytes, parts, list(range(2, len(parts))), types
            if kind[0] == gguf.GGUFValueType.STRING:
                parts, end = [kind, length], orig_offs + 12
                data = self._data.data
                for _ in range(int(length[0])):
                    start = end + 8
                    end = start + int.from_bytes(data[end:start], "little")
                    parts += [self._data[start - 8 : start], self._data[start:end]]
                types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]
                return end - orig_offs, parts, list(range(3, len(parts), 2)), types
        return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
