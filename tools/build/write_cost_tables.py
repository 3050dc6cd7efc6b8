"""Renew the table of docs/cost_model.md after a change of kernels."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.kernels.cost_tables import with_table  # noqa: E402

page = ROOT / "docs" / "cost_model.md"
page.write_text(with_table(page.read_text()))
