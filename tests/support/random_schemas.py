"""Random JSON schemas, and texts that a model makes under them."""

import random
from typing import Any

from metal_prefill import Model

Schema = dict[str, Any]
WORDS = ("name", "age", "city", "kind", "notes", "size", "tags", "x", "y", "über", 'a"b', "line\nbreak")


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """Return a schema whose instances are all short."""
    kinds = ["integer", "number", "boolean", "null", "string", "pattern", "enum", "const"]
    kind = rng.choice([*kinds, *["object", "array", "anyOf"] * (2 if depth else 0)])
    if kind == "integer":
        low = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)}
    if kind == "number":
        # A number of any length would be one: models like to repeat digits.
        return {"type": "number", "minimum": 0, "maximum": rng.choice([1, 10, 99.5]), "multipleOf": 0.25}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "string":
        return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": rng.choice(["^[A-Z][a-z]{2,5}$", r"^\d{4}-\d{2}$", "^(on|off)$"]),
        }
    if kind == "enum":
        return {"enum": rng.sample([*WORDS, 1, 2.5, None, True], rng.randrange(1, 5))}
    if kind == "const":
        return {"const": rng.choice([*WORDS, 7, [1, 2]])}
    if kind == "array":
        least = rng.randrange(3)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randrange(3)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    names = rng.sample(WORDS, rng.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randrange(1, len(names) + 1)),
        "additionalProperties": False,
    }


def make(model: Model, n: int, max_tokens: int) -> list[tuple[Schema, str]]:
    """Make a text under each of `n` schemas."""
    made = []
    for i in range(n):
        rng = random.Random(i)
        schema = random_schema(rng)
        options: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.5]), "seed": i}
        prompt = rng.choice(["A record: ", "JSON:\n", "The answer is "])
        pieces = list(model.session().stream(prompt, max_tokens, json_schema=schema, **options))
        text = "".join(piece.text for piece in pieces)
        assert pieces[-1].finish_reason == "stop", (schema, text)
        made.append((schema, text))
    return made
