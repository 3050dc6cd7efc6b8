"""Tools, and chat templates with and without a description of tools."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK = {"name": "clock", "parameters": {}}
HERMES = (  # tools, calls and results in the form of Hermes 2 and Qwen 2.5
    "{% if tools %}<tools>{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\n</tools>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}"
    "{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ITERATES = (  # in the form of Mistral's and Qwen3.5's templates
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.tool_calls is defined %}[CALLS]{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id is not string or call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }};{% endfor %}{% endfor %}"
    "{% endif %}{% if m.thinking is defined %}({{ m.thinking }}){% endif %}\n{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}assistant: "
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = [{"role": "user", "content": "How is it in Verona?"}]
