"""Requests whose constraints compile or match slowly, or are rejected."""

from typing import Any

from metal_prefill import Model

SPACE = b" "
PLAIN: dict[str, Any] = {"prompt": "ROMEO:\n", "max_tokens": 12, "temperature": 0}


def hostile_requests(model: Model) -> list[dict[str, Any]]:
    """Return requests whose constraints compile or match slowly, or are too deep."""
    space = next(i for i in range(model.config.vocab_size) if model.tokenizer.token_bytes(i) == SPACE)
    hanging = {"max_tokens": 90, "min_tokens": 90, "logit_bias": {str(space): 100}, "temperature": 0}
    ignored = ["/[ ]+/", "/ +/"]
    chain = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(3000)), 'r3000: "a"'])
    sources: list[dict[str, Any]] = [
        *({"grammar": f'%ignore {i}\nstart: "b"+ | " "{{3,90}}', **hanging} for i in ignored),
        {"grammar": chain},
        *({"regex": f"(a{{9{i}0}}){{900}}"} for i in range(3)),
        {"regex": "(" * 100_000},
    ]
    return [{**PLAIN, **source} for source in sources]
