# Only test builds contain the emulator, and only tests use its module.
^_core\.emulator$:
    \from typing import Any
    emulator: Any

# Likewise: the kernels of the CPU engine.
^_core\.cpu$:
    \from typing import Any
    cpu: Any

# Tables, whose types the generator does not infer: bytes of each struct, and name, type, offset and count of its
# fields.
^_core\.args_structs$:
    args_structs: dict[str, tuple[int, list[tuple[str, str, int, int]]]]

^_core\.shader_constants$:
    shader_constants: dict[str, int]
