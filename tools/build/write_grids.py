"""Write ``shaders/grids.h``: the grids of the IQ formats, from the gguf package.

The grids are part of the formats. Run it when a format with a grid is added::

    python tools/build/write_grids.py
"""

from pathlib import Path

import numpy as np
from gguf import quants

GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
PER_LINE = 16
HEADER = """\
// The grids of the IQ formats, which are part of the formats: vectors of eight levels of 2 bits, or of four
// of 3 bits, the first in the lowest bits. Written by tools/build/write_grids.py, from the gguf package.
#pragma once

#include "quants.h"

#ifdef __METAL_VERSION__
#define GRID static constant constexpr u16_t
#else
#define GRID inline constexpr u16_t
#endif

// clang-format off
"""


def grid(name: str) -> list[int]:
    """Return the vectors of a format as words."""
    kind = getattr(quants, name)
    kind.init_grid()
    values = np.asarray(kind.grid).reshape(kind.grid_shape)
    levels = np.searchsorted(np.array(kind.grid_map, np.float32), values)
    length = values.shape[1]
    bits = {8: 2, 4: 3}[length]
    return (levels << (bits * np.arange(length))).sum(axis=1).tolist()


def main() -> None:
    """Write the header."""
    parts = [HEADER]
    for name in GRIDS:
        words = grid(name)
        lines = [words[i : i + PER_LINE] for i in range(0, len(words), PER_LINE)]
        body = "\n".join("  " + " ".join(f"{word}," for word in line) for line in lines)
        parts.append(f"GRID k{name}_grid[{len(words)}] = {{\n{body}\n}};\n")
    parts.append("// clang-format on\n#undef GRID\n")
    path = Path(__file__).parents[2] / "shaders" / "grids.h"
    path.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
