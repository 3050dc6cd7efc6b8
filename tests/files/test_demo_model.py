"""The demo model's file is the one that its card describes."""

import hashlib

from support.places import ROOT

DATA = ROOT / "python" / "metal_prefill" / "data"


def test_the_model_card_describes_this_file() -> None:
    card, content = (DATA / "MODEL_CARD.md").read_text(), (DATA / "shakespeare-5m.Q4_0.gguf").read_bytes()
    assert hashlib.sha256(content).hexdigest() in card
    assert f"{len(content):,} bytes" in card
