"""Chat templates of LFM2.5, Qwen3.5 and Granite 4, rendered as transformers renders them."""

import re

import pytest
from support.servers.chat_families import CONVERSATIONS, FAMILIES, TOKENS, Family, cases, recorded

from metal_prefill import ChatTemplateError
from metal_prefill.text import ChatTemplate


def rendered(family: Family) -> dict[str, str | None]:
    """Return what the package renders in each case, None where the template raises an error."""
    template = ChatTemplate(family.template, family.special)
    found: dict[str, str | None] = {}
    for case in cases(family.template):
        try:
            pieces = template.render(case.messages, case.variables, case.tools, case.documents)
        except ChatTemplateError:
            found[case.name] = None
        else:
            found[case.name] = "".join(text for text, _ in pieces)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_render_as_in_transformers(name: str) -> None:
    assert rendered(FAMILIES[name]) == recorded()[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_template_writes_control_tokens(name: str) -> None:
    family = FAMILIES[name]
    template = ChatTemplate(family.template, family.special)
    any_control_token = re.compile("|".join(map(re.escape, family.special)))
    hostile = CONVERSATIONS["control tokens in texts"]
    harmless = [{**m, "content": any_control_token.sub("", m["content"])} for m in hostile]
    written = [
        [text for text, special in template.render(messages, TOKENS) if special]
        for messages in (hostile, harmless)
    ]
    assert written[0] == written[1]
    assert any(any_control_token.search(message["content"]) for message in hostile)
