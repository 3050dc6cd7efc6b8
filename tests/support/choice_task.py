"""Choices and texts whose likelihoods are recorded with lm-eval, and a small random model."""

from pathlib import Path

from metal_prefill import synth
from support.places import DATA

FILE = DATA / "transformers_likelihoods.json"
# Contexts and continuations.
CHOICES = [
    (f"Question: {question}\nAnswer:", f" {choice}")
    for question, choices in (
        ("Who went to the woods?", ("the teacher", "a man who wished to live", "nobody", "42 hens!")),
        ("What is the sea made of?", ("salt water", "stone", "light and air", "bread")),
        ("Is this a question?", ("no", "yes", "perhaps it is, perhaps not", "ask again")),
        ("Name a colour.", ("Tuesday", "seven", "green", "to run")),
        ("", ("one", "two", "three", "nr")),  # the last one is the model's own text
    )
    for choice in choices
]
# Whole texts: short, and of several contexts of the model.
TEXTS = ("To be, or not to be", "A", " ".join(f"The {i}th man went to the sea." for i in range(60)))


def model(folder: Path) -> Path:
    return synth.synthesize(folder / "model.gguf", preset="tiny", vocab=2048, seed=17)
