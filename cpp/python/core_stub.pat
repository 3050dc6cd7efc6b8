# Tables, whose types the generator does not infer: bytes of each struct, and name, type, offset and count of its
# fields.
^_core\.args_structs$:
    args_structs: dict[str, tuple[int, list[tuple[str, str, int, int]]]]

^_core\.shader_constants$:
    shader_constants: dict[str, int]
