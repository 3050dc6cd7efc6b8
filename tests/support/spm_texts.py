"""Texts whose tokens are recorded with SentencePiece."""

TEXTS = [
    "But soft, what light through yonder window breaks?",
    "  Two   households\u00a0x ",
    "\ufb01ne \u2014 it is",
    "\u65e5\u672c is the sun",
    "",
    "the\u2014east",
]
