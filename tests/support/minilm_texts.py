"""Texts with recorded vectors of all-MiniLM-L6-v2."""

from support.comparison import PROSE, VERSE
from support.places import DATA

VECTORS = DATA / "minilm_vectors.npz"

TEXTS = (
    *("That is a happy person", "That is a happy dog", "Today is a sunny day"),
    *("What is the capital of France?", "Paris is the capital of France."),
    *("The mitochondrion is the powerhouse of the cell.", "", "x"),
    *("Größe naïve café 漢字 \U0001f3ad unaffable", "def f(x): return x ** 2  # squares"),
    PROSE,
    VERSE,
    " ".join([VERSE] * 3),
)
