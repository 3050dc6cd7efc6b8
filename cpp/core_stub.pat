# The emulator is there in test builds only, and its module is for tests.
^_core\.emulator$:
    \from typing import Any
    emulator: Any
