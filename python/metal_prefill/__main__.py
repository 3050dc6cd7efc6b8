"""``python -m metal_prefill`` is ``metal-prefill``."""

import sys

from metal_prefill.cli import main

sys.exit(main())
