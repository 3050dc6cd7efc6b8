"""Tools in two turns, with templates that have the rules of published ones, a row for each family."""

import json
from typing import Any, NamedTuple

import pytest
from support.tools import CLOCK, WEATHER

from metal_prefill import ChatTemplateError
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
# Arguments are pairs; values that are not text are JSON. Null would be written as "None".
GLM = Rules(
    """{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {{- '<|assistant|>\\n<think></think>' + m.content | string }}
    {%- for call in m.tool_calls or [] %}
      {%- if call.function %}{% set call = call.function %}{% endif %}
      {{- '\\n<tool_call>' + call.name }}
      {%- for key, value in call.arguments.items() %}
        {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
        {{- value if value is string else value | tojson }}{{ '</arg_value>' }}
      {%- endfor %}{{ '\\n</tool_call>' }}
    {%- endfor %}
  {%- elif m.role == 'tool' %}{{ '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
  {%- else %}{{ '<|user|>\\n' + m.content }}{% endif %}
{%- endfor %}""",
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Verona</arg_value>\n</tool_call>",
    "<tool_response>\nrain",
)
# Results have the name of the call with their id.
GEMMA4 = Rules(
    """{%- macro written(value) %}
  {%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
  {%- elif value is mapping %}{% raw %}{{% endraw %}
    {%- for k, v in value.items() %}{{ k + ':' + written(v) + ('' if loop.last else ',') }}{% endfor %}
    {%- raw %}}{% endraw %}
  {%- else %}{{ value | tojson }}{% endif %}
{%- endmacro %}
{%- for m in messages if m.role != 'tool' %}
  {{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content }}
  {%- for call in m.tool_calls or [] %}
    {{- '<|tool_call>call:' + call.function.name + written(call.function.arguments) + '<tool_call|>' }}
    {%- for result in messages if result.tool_call_id == call.id %}
      {{- '<|tool_response>response:' + call.function.name + '{value:' + written(result.content) + '}' }}
    {%- endfor %}
  {%- endfor %}{{ '<turn|>\\n' }}
{%- endfor %}""",
    '<|tool_call>call:weather{city:<|"|>Verona<|"|>}<tool_call|>',
    'response:weather{value:<|"|>rain',
)
FUNCTION_GEMMA = Rules(
    GEMMA4.template.replace('<|"|>', "<escape>")
    .replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>"),
    "<start_function_call>call:weather{city:<escape>Verona<escape>}<end_function_call>",
    "response:weather{value:<escape>rain",
)
# Calls are Python in a fence within tags.
MINICPM3 = Rules(
    """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
  {%- if m.tool_calls %}{{ '<|tool_call_start|>\\n```python\\n' }}
    {%- for call in m.tool_calls %}{{ call.function.name + '(' }}
      {%- for key, value in call.function.arguments.items() %}
        {{- key + '=' }}{{ '"' + value + '"' if value is string else value }}{{ '' if loop.last else ',' }}
      {%- endfor %}{{ ')\\n' }}
    {%- endfor %}{{ '```\\n<|tool_call_end|>\\n' }}
  {%- endif %}{{ m.content + '<|im_end|>\\n' }}
{%- endfor %}""",
    '<|tool_call_start|>\n```python\nweather(city="Verona")\n```\n<|tool_call_end|>',
    "<|im_start|>tool\nrain",
)
# The template numbers calls itself, and has other names of their fields.
COMMAND_R7B = Rules(
    """{%- set ns = namespace(ids=[]) %}
{%- for m in messages %}
  {%- if m.role == 'assistant' and m.tool_calls %}{{ '<|START_ACTION|>[' }}
    {%- for call in m.tool_calls %}
      {{- '\\n    {"tool_call_id": "' + ns.ids | length | string + '", "tool_name": "' + call.function.name }}
      {{- '", "parameters": ' + call.function.arguments | tojson + '}' + ('' if loop.last else ',') }}
      {%- set ns.ids = ns.ids + [call.id] %}
    {%- endfor %}{{ '\\n]<|END_ACTION|>' }}
  {%- elif m.role == 'tool' %}
    {%- if m.tool_call_id not in ns.ids %}{{ raise_exception('no such call') }}{% endif %}
    {{- '<|START_TOOL_RESULT|>' + m.content.strip() + '<|END_TOOL_RESULT|>' }}
  {%- else %}{{ m.role + m.content.strip() }}{% endif %}
{%- endfor %}""",
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Verona"}}'
    "\n]<|END_ACTION|>",
    "<|START_TOOL_RESULT|>rain",
)
# One call for each turn, in another role's name for results.
LLAMA = Rules(
    """{%- for m in messages %}
  {%- if m.tool_calls is defined %}
    {%- if m.tool_calls | length != 1 %}{{ raise_exception('only one call') }}{% endif %}
    {{- 'assistant\\n\\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
    {{- m.tool_calls[0].function.arguments | tojson + '}' }}
  {%- elif m.role in ('tool', 'ipython') %}
    {{- 'ipython\\n\\n' }}{{ m.content | tojson if m.content is mapping else m.content }}
  {%- else %}{{ m.role + '\\n\\n' + m.content | trim }}{% endif %}
{%- endfor %}""",
    '{"name": "weather", "parameters": {"city": "Verona"}}',
    "ipython\n\nrain",
)
FAMILIES = {
    "mistral": MISTRAL,
    "functionary": FUNCTIONARY,
    "glm": GLM,
    "gemma 4": GEMMA4,
    "function gemma": FUNCTION_GEMMA,
    "minicpm 3": MINICPM3,
    "command r7b": COMMAND_R7B,
    "llama 3": LLAMA,
}


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    return "".join(text for text, _ in ChatTemplate(template + "{#{{ tools }}#}", []).render(messages, {}))


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
        found = rendered(rules.template, messages)
        written = rules.call.replace('"0"', f'"{turn}"')
        assert found.count(rules.result) == turn + 1
        assert written in found
        assert [call.name for call in parse_tool_calls(found).calls] == ["weather"] * (turn + 1)
        assert "None" not in found
        messages.append({"role": "assistant", "content": "Rain."})
    assert messages[1]["content"] is None, "a message of the caller was changed"


def test_a_template_without_a_role_names_it() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    )
    with pytest.raises(ChatTemplateError, match="rejects the messages: System role not supported"):
        rendered(template, [{"role": "system", "content": "Be brief."}])
