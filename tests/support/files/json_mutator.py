"""Changes JSON at a random place."""

import copy
from collections.abc import Sequence
from random import Random
from typing import Any


def changed(content: Any, random: Random, values: Sequence[Any]) -> Any:
    """Return a copy with another value, or without one, at a random place."""
    content = copy.deepcopy(content)
    place: Any = None
    key: Any = None
    node = content
    while isinstance(node, (dict, list)) and node and random.random() < 0.8:
        place, key = node, random.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = node[key]
    if place is None:
        return random.choice(values)
    if random.random() < 0.2:
        del place[key]
    elif random.random() < 0.1 and isinstance(place, dict):
        place[random.choice(("", "\ud800", "-1", "9" * 5000, "x" * 5000))] = place.pop(key)
    else:
        place[key] = random.choice(values)
    return content
