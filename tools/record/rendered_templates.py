"""Record the texts that Hugging Face transformers renders with chat templates, or compare templates with it.

Run it when a template or a conversation of ``tests/support/chat_families.py`` changes. With files or
folders of published templates (``*.jinja``) as arguments, it renders the same conversations with these, and
prints the cases in which the package renders another text.
"""

import json
import sys
from pathlib import Path

from support.chat_families import FAMILIES, RECORD, cases, rendered_by_transformers

from metal_prefill import ChatTemplateError
from metal_prefill.text import ChatTemplate

CONTROL_TOKENS = sorted({token for family in FAMILIES.values() for token in family.special})


def differences(path: Path) -> list[str]:
    """Return the cases in which the package and transformers render different texts with a template.

    A template that ignores tools is an error here, and none in transformers. This is no difference.
    """
    source = path.read_text(encoding="utf-8")
    template = ChatTemplate(source, CONTROL_TOKENS)
    expected = rendered_by_transformers(source)
    found = []
    for case in cases(source):
        try:
            pieces = template.render(case.messages, case.variables, case.tools, case.documents)
            text: str | None = "".join(piece for piece, _ in pieces)
        except ChatTemplateError as error:
            if "does not support tools" in str(error):
                continue
            text = None
        if text != expected[case.name]:
            found.append(case.name)
    return found


def main(*names: str) -> None:
    """Write the record, or compare the templates that are named."""
    if not names:
        record = {name: rendered_by_transformers(family.template) for name, family in FAMILIES.items()}
        RECORD.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        print(f"{RECORD}: {RECORD.stat().st_size:,} bytes")
        return
    paths = [path for name in names for path in sorted(Path(name).rglob("*.jinja")) or [Path(name)]]
    failed = {path: found for path in paths if (found := differences(path))}
    for path, found in failed.items():
        print(f"{path}: {len(found)} cases differ, such as {found[0]}")
    print(f"{len(paths) - len(failed)} of {len(paths)} templates are rendered as in transformers")
    sys.exit(bool(failed))
