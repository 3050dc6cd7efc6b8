"""Random JSON schemas."""

import random
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "age", "city", "kind", "notes", "size", "tags", "x", "y", "über", 'a"b', "line\nbreak")
PATTERNS = ("^[A-Z][a-z]{2,5}$", r"^\d{4}-\d{2}$", "^(on|off)$")


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """Return a schema whose instances are all short."""
    low, least = rng.randrange(-50, 50), rng.randrange(3)
    if depth == 0 or rng.random() < 0.5:
        schemas: list[Schema] = [
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)},
            # Unrestricted numbers may be long: models tend to repeat digits.
            {"type": "number", "minimum": 0, "maximum": rng.choice([1, 10, 99.5]), "multipleOf": 0.25},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "minLength": least, "maxLength": rng.randrange(3, 9)},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"enum": rng.sample([*WORDS, 1, 2.5, None, True], rng.randrange(1, 5))},
            {"const": rng.choice([*WORDS, 7, [1, 2]])},
        ]
        return rng.choice(schemas)
    names = rng.sample(WORDS, rng.randrange(1, 5))
    parts = {name: random_schema(rng, depth - 1) for name in names}
    required = rng.sample(names, rng.randrange(1, len(names) + 1))
    return rng.choice(
        [
            {"type": "array", "items": parts[names[0]], "minItems": least, "maxItems": least + 2},
            {"anyOf": list(parts.values())},
            {"type": "object", "properties": parts, "required": required, "additionalProperties": False},
        ]
    )
