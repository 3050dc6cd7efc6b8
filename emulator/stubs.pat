_core\.emulator$:
    \from types import ModuleType as ModuleType
    emulator: ModuleType
