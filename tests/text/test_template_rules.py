"""Tools in two turns, with templates that have the rules of published ones, a row for each family."""

import json
from typing import Any, NamedTuple

import pytest
from support.tools import CLOCK, WEATHER

from metal_prefill.text import ChatTemplate, parse_tool_calls


class Rules(NamedTuple):
    """A template, the call that its model writes for the weather in Verona, and the mark of a result."""

    template: str
    call: str
    result: str = "rain"


# Roles alternate except around calls, ids have nine letters and digits, and contents are not null.
MISTRAL = Rules(
    """{%- set ns = namespace(user=true) %}
{%- for m in messages if m.role in ('user', 'assistant') and m.tool_calls is undefined %}
  {%- if (m.role == 'user') != ns.user %}{{ raise_exception('roles must alternate') }}{% endif %}
  {%- set ns.user = not ns.user %}
{%- endfor %}
{%- for m in messages %}
  {%- if m.tool_calls is defined %}
    {%- for call in m.tool_calls %}
      {%- if call.id is undefined or call.id | length != 9 %}{{ raise_exception('length 9') }}{% endif %}
      {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
    {%- endfor %}
    {{- m.content + '</s>' }}
  {%- elif m.role == 'tool' %}
    {%- if m.tool_call_id | length != 9 %}{{ raise_exception('length 9') }}{% endif %}
    {{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
  {%- else %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + '</s>' }}{% endif %}
{%- endfor %}""",
    '[TOOL_CALLS]weather[ARGS]{"city": "Verona"}',
    "[TOOL_RESULTS]rain",
)
# Arguments are text.
FUNCTIONARY = Rules(
    """{%- for m in messages %}
  {%- if m.role == 'assistant' and m.tool_calls %}
    {%- if m.content %}{{ '>>>all\\n' + m.content }}{% endif %}
    {%- for call in m.tool_calls %}
      {{- '<function=' + call.function.name + '>' + call.function.arguments + '</function>' }}
    {%- endfor %}{{ '<|eot|>' }}
  {%- else %}{{ m.role + ':' + m.content + '<|eot|>' }}{% endif %}
{%- endfor %}""",
    '<function=weather>{"city": "Verona"}</function>',
    "tool:rain",
)
FAMILIES = {"mistral": MISTRAL, "functionary": FUNCTIONARY}


@pytest.mark.parametrize("as_text", [False, True], ids=["mapping", "text"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tools_are_called_in_two_turns(name: str, as_text: bool) -> None:
    """A call is found in an answer, and the template writes it in the same form in the next turn."""
    rules = FAMILIES[name]
    messages: list[dict[str, Any]] = []
    for turn in range(2):
        text, (call,) = parse_tool_calls(rules.call, [WEATHER, CLOCK])
        assert (text, call.name, call.arguments) == ("", "weather", {"city": "Verona"})
        called = call.with_id.as_message()
        if as_text:
            called["function"]["arguments"] = json.dumps(call.arguments)
        messages += [
            {"role": "user", "content": "How is it?"},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": called["id"], "name": "weather", "content": "rain"},
        ]
        pieces = ChatTemplate(rules.template + "{#{{ tools }}#}", []).render(messages, {})
        found = "".join(piece for piece, _ in pieces)
        assert found.count(rules.result) == turn + 1
        assert rules.call in found
        assert [call.name for call in parse_tool_calls(found).calls] == ["weather"] * (turn + 1)
        assert "None" not in found
        messages.append({"role": "assistant", "content": "Rain."})
    assert messages[1]["content"] is None, "a message of the caller was changed"
