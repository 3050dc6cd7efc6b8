"""Requests whose constraints compile or match slowly, or are rejected."""

from typing import Any

from metal_prefill import Model

# llguidance's time for it doubles with each space of a text, with any limits.
HANGING = '%ignore /[ ]+/\nstart: "b"+ | " "{3,90}'
PLAIN: dict[str, Any] = {"prompt": "ROMEO:\n", "max_tokens": 12, "temperature": 0}


def space_of(model: Model) -> int:
    """Return the token that is a single space."""
    return next(i for i in range(model.config.vocab_size) if model.tokenizer.token_bytes(i) == b" ")


def hostile_requests(model: Model) -> list[dict[str, Any]]:
    """Return requests whose constraints compile or match slowly, or are too deep."""
    bias = {str(space_of(model)): 100}
    hanging = {"max_tokens": 90, "min_tokens": 90, "logit_bias": bias, "temperature": 0}
    chain = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(3000)), 'r3000: "a"'])
    sources: list[dict[str, Any]] = [
        *({"grammar": source, **hanging} for source in (HANGING, HANGING.replace("[ ]", " "))),
        {"grammar": chain},
        *({"regex": f"(a{{9{i}0}}){{900}}"} for i in range(3)),
        {"regex": "(" * 100_000},
    ]
    return [{**PLAIN, **source} for source in sources]
