"""Record the texts that Hugging Face transformers renders with chat templates.

Run it when a template or a conversation of ``tests/support/servers/chat_families.py`` changes.
"""

import json

from jinja2 import TemplateError
from record import Records
from support.servers.chat_families import FAMILIES, RECORD, cases
from transformers.utils.chat_template_utils import render_jinja_template


def rendered_by_transformers(template: str) -> dict[str, str | None]:
    """Return the texts that transformers renders, by case; None if the template raises an error."""
    found: dict[str, str | None] = {}
    for case in cases(template):
        try:
            texts, _ = render_jinja_template(
                [case.messages],
                tools=case.tools,
                documents=case.documents,
                chat_template=template,
                **case.variables,
            )
        except (TemplateError, TypeError):
            found[case.name] = None
        else:
            found[case.name] = texts[0]
    return found


def records() -> Records:
    """Yield the record."""
    record = {name: rendered_by_transformers(family.template) for name, family in FAMILIES.items()}
    yield RECORD, json.dumps(record, ensure_ascii=False, indent=1)
