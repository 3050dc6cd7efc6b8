"""Renew the tables of docs/cost_model.md and docs/measurements/cost-model.md after a change of kernels."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.cost_tables import TABLES, spread, with_tables  # noqa: E402

for page in TABLES:
    file = ROOT / "docs" / page
    file.write_text(with_tables(page, file.read_text()))
print("SPREAD =", spread())
