"""``python -m metal_prefill.bench`` is ``metal-prefill bench``."""

import sys

from metal_prefill.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
