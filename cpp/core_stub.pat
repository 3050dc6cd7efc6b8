# The emulator is there in test builds only, and its module is for tests.
^_core\.emulator$:
    \from typing import Any
    emulator: Any

# Likewise: the kernels of the CPU engine.
^_core\.cpu$:
    \from typing import Any
    cpu: Any
