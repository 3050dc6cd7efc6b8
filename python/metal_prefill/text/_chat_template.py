"""Chat templates, which render a conversation in the format that a model was trained on.

A template is Jinja source in the model file. It is rendered as in Hugging Face transformers, in a sandbox and
with limits on its computation. Messages are untrusted input: a message that contains the text ``<|im_end|>``
must not end its turn. Every string in a message is therefore marked before rendering: a marker, a character
that occurs nowhere else, is inserted after each position where the spelling of a control token could begin.
In the rendered text, only the template's own control tokens are intact. They are split off first, and the
marker is then removed from the text between them.
"""

import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from metal_prefill._support.cached_property import cached_property
from metal_prefill.errors import ChatTemplateError
from metal_prefill.text._json_calls import read_arguments
from metal_prefill.text._template_limits import MAX_SOURCE, LimitedEnvironment, TemplateLimitError, render
from metal_prefill.text._tool_calls import tool_names

_ROLE = re.compile(r"[\w-]+")
_MAX_TIME_FORMAT = 1000  # characters
_WIDTH = re.compile(r"(?<!%)(?:%%)*%[^A-Za-z%]*\d{3}")
# Candidates for the marker: Braille patterns, rare ideographs and private use characters. If a template
# prints a list, `repr` keeps the first two as they are, and escapes the last.
_MARKERS = (range(0x2801, 0x2900), range(0x20000, 0x2A6D7), range(0xF0000, 0xFFFFE))
# Characters of all ends of all control tokens, which a pattern contains: 200 MB. 6,000 control tokens of 12
# characters have a fifth.
MOST_ENDS = 1 << 21
# A character in JSON; its group is the second surrogate, or another character, that may follow.
_ESCAPED = re.compile(r"\\u[0-9a-f]{4}(?=((?:\\u[0-9a-f]{4})?))")
# Names under which clients send the reasoning of an assistant, and templates read it.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _GenerationTag(Extension):
    """``{% generation %}``, which marks assistant text for training and is rendered as its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    # C libraries pad to any width in a format, and Python provides a buffer of 256 times its length.
    if len(format) > _MAX_TIME_FORMAT or _WIDTH.search(format):
        raise TemplateLimitError(
            f"a strftime_now format has more than {_MAX_TIME_FORMAT} characters, or a width of 3 digits"
        )
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _plain(value: Any, where: str) -> Any:
    """Copy a message value into built-in types, so that all of its strings can be searched."""
    if value is None or isinstance(value, bool):
        return value
    # Convert subclasses to the base type, because they may define their own text form.
    if isinstance(value, str):
        text = str.__str__(value)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} has a lone surrogate at index {error.start}") from None
        return text
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(k, f"a key of {where}"): _plain(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    raise TypeError(
        f"{where} is of type {type(value).__name__}: "
        "a message may contain text, numbers, booleans, None, lists and mappings"
    )


def _plain_all(what: str, values: Sequence[Mapping[str, Any]]) -> list[dict[Any, Any]]:
    """Copy messages, tools or documents; raise the same errors as `_plain`."""
    try:
        return [_plain(value, f"{what} {i}") for i, value in enumerate(values)]
    except RecursionError:
        raise ValueError(f"a {what} is nested too deeply") from None


class _Arguments(dict[Any, Any]):
    """Arguments of a call: a mapping, which is JSON in templates that write arguments as text."""

    def __str__(self) -> str:
        return _tojson(self)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def _complete(message: dict[Any, Any], where: str) -> dict[Any, Any]:
    """Parse JSON arguments of a message's tool calls, and replace a null as its content, in place.

    Arguments that end too early, as in a truncated answer, are completed. A list without calls is
    removed, because templates test whether there is one.
    """
    if message.get("content", "") is None:
        message["content"] = ""  # templates write None or null, or fail
    calls = message.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)
    for i, call in enumerate(calls if isinstance(calls, list) else ()):
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or "arguments" not in inner:
            continue
        given = inner["arguments"]
        arguments = read_arguments(given) if isinstance(given, str) else given
        if arguments is not None and not isinstance(arguments, dict):
            field = "function.arguments" if inner is not call else "arguments"
            raise ValueError(f"{where}.tool_calls[{i}].{field} must be a JSON object, got {given!r:.80}")
        inner["arguments"] = _Arguments(arguments or {})
    return message


def _with_reasoning(message: dict[Any, Any]) -> dict[Any, Any]:
    """Copy the reasoning of a message to the names that templates read, as transformers does."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, list):
        for element in value:
            yield from _strings(element)


class ChatTemplate:
    """A chat template, and the control tokens that it may produce but messages may not.

    Parameters
    ----------
    source
        Jinja source.
    special
        Spellings of the control tokens.

    Raises
    ------
    ChatTemplateError
        The source is not a valid template, or the control tokens are too long.
    """

    def __init__(self, source: str, special: Iterable[str]) -> None:
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(f"the chat template has {len(source)} characters, more than {MAX_SOURCE}")
        self._source = source
        self._special = sorted((s for s in special if len(s) > 1), key=len, reverse=True)
        ends = sum(len(s) * (len(s) - 1) // 2 for s in self._special)
        if ends > MOST_ENDS:
            raise ChatTemplateError(
                f"the control tokens are too long for a chat template: their ends have {ends} characters, "
                f"more than {MOST_ENDS}"
            )
        try:
            self._environment = LimitedEnvironment(
                {"tojson": _tojson},
                {"raise_exception": _raise_exception, "strftime_now": _strftime_now},
                trim_blocks=True,
                lstrip_blocks=True,
                extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            )
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"line {error.lineno} of the chat template: {error.message}") from None
        # Python cannot compile the generated code: it is nested too deeply, or breaks outside a loop.
        except Exception as error:
            raise ChatTemplateError(f"the chat template: {type(error).__name__}: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        *,
        untrusted: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> list[tuple[str, bool]]:
        """Render messages to pieces of text, each with a flag for the spelling of a control token.

        Parameters
        ----------
        messages
            Mappings with a ``role`` and, usually, a ``content``; other entries are passed to the template.
        variables
            Template variables, such as ``bos_token`` and ``add_generation_prompt``. They are trusted and not
            marked.
        tools, documents
            Tools that the model may call, and texts to answer from; marked in the same way as messages.
        untrusted
            Further variables, which are marked, too.
        continues
            Whether the text ends with the content of the last message.

        Raises
        ------
        ChatTemplateError
            The template rejects these messages, fails, exceeds a limit, or does not support tools or
            documents.
        TypeError, ValueError
            A message, tool or document is not a mapping, lacks a role or name, or contains a type that JSON
            lacks.
        """
        for i, message in enumerate(messages):
            role = message.get("role") if isinstance(message, Mapping) else None
            if not isinstance(role, str):
                raise TypeError(f"message {i} must be a mapping with a string 'role', got {message!r}")
            if not _ROLE.fullmatch(role):  # templates put roles into control tokens: '<|' + role + '|>'
                raise ValueError(f"message {i} has the role {role!r}, must be a word")
        self.check_tools(tools)
        plain = [
            _with_reasoning(_complete(message, f"messages[{i}]"))
            for i, message in enumerate(_plain_all("message", messages))
        ]
        plain_tools = _plain_all("tool", tools or ())
        plain_documents = _plain_all("document", documents or ())
        if plain_documents and not self.reads("documents"):
            raise ChatTemplateError("the chat template does not support documents; put them into a message")
        (plain_variables,) = _plain_all("variable", [untrusted or {}])
        everything = [*plain, *plain_tools, *plain_documents, plain_variables]
        marker = self._unused_character(everything)
        end = self._unused_character([*everything, {marker: None}]) if continues else ""
        if continues:
            if not plain or plain[-1]["role"] != "assistant" or not isinstance(plain[-1].get("content"), str):
                raise ValueError("only a last message of an assistant with a text can be continued")
            plain[-1]["content"] += end
        marked = {
            **{name: self._mark(value, marker) for name, value in plain_variables.items()},
            "messages": [
                {key: value if key == "role" else self._mark(value, marker) for key, value in message.items()}
                for message in plain
            ],
            "tools": self._mark(plain_tools, marker) or None,
            "documents": self._mark(plain_documents, marker) or None,
        }
        try:
            text = render(self._template, {**variables, **marked})
            text.encode("utf-8")
        except TemplateLimitError as error:
            raise ChatTemplateError(f"the chat template exceeds a limit: {error}") from None
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template rejects the messages: {error}") from error
        except Exception as error:  # an expression in a template can raise anything
            raise ChatTemplateError(f"the chat template fails: {type(error).__name__}: {error}") from error
        if continues:
            text, found_end, _ = text.rpartition(end)
            if not found_end:
                raise ChatTemplateError("the chat template does not keep the end of the last message")
            text = text.replace(end, "")
        found = self._tokens.split(text) if self._special else [text]
        # After a split by a pattern with one group, every second piece is a match.
        escaped = json.dumps(marker)[1:-1]  # as templates write it with `tojson(ensure_ascii=True)`
        return [
            (piece.replace(marker, "").replace(escaped, ""), bool(i % 2))
            for i, piece in enumerate(found)
            if piece
        ]

    def check_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        if not tools:
            return
        tool_names(tools)
        if not self.reads("tools"):
            raise ChatTemplateError("the chat template does not support tools; use a model trained for them")

    def reads(self, variable: str) -> bool:
        names = self._environment.parse(self._source).find_all(nodes.Name)
        return any(name.name == variable for name in names)

    def _unused_character(self, messages: list[dict[Any, Any]]) -> str:
        """Return a character that occurs neither in the template nor in messages, escaped or not.

        Takes time linear in the texts, whatever they contain.
        """
        texts = [self._source, *_strings(messages)]
        used = set().union(*texts)
        escaped: set[str] = set()
        for match in itertools.chain.from_iterable(map(_ESCAPED.finditer, texts)):
            escaped |= {match[0], match[0] + match[1]}
        for candidate in map(chr, itertools.chain(*_MARKERS)):
            if candidate not in used and json.dumps(candidate)[1:-1] not in escaped:
                return candidate
        count = sum(map(len, _MARKERS))
        raise ValueError(f"the messages contain all of the {count:,} characters that can mark control tokens")

    def _mark(self, value: Any, marker: str) -> Any:
        if isinstance(value, str):
            if not self._special:
                return value
            text = self._first_characters.sub(lambda m: m[0] if m[1] else m[0] + marker, value)
            start = self._completion(text)
            return text if start is None else text[:start] + marker + text[start:]
        if isinstance(value, dict):
            return type(value)({self._mark(k, marker): self._mark(v, marker) for k, v in value.items()})
        if isinstance(value, list):
            return [self._mark(v, marker) for v in value]
        return value

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        return re.compile("(" + "|".join(map(re.escape, self._special)) + ")")

    @cached_property
    def _first_characters(self) -> re.Pattern[str]:
        """Pattern of the first characters of control tokens; its group matches words that the template uses.

        Templates search messages for such words, such as ``</think>``, which must therefore stay unmarked.
        This is safe, because none of them is a prefix of a control token, or has one as a prefix.
        """
        constants = {
            node.value
            for node in self._environment.parse(self._source).find_all(nodes.Const)
            if isinstance(node.value, str)
        }
        firsts = {s[0] for s in self._special}
        harmless = [
            word
            for word in sorted(constants, key=len, reverse=True)
            if word[:1] in firsts and not any(s.startswith(word) or word.startswith(s) for s in self._special)
        ]
        words = "|".join(map(re.escape, harmless)) or r"(?!)"
        return re.compile(f"({words})|[{re.escape(''.join(sorted(firsts)))}]")

    def _completion(self, text: str) -> int | None:
        """Return where a text, after white space, could complete a control token begun by the template."""
        first = len(text) - len(text.lstrip())
        ends, longest = self._endings
        for start in range(first, max(first - longest, 0) - 1, -1):  # an end may begin with white space
            rest = text[start : start + longest]
            # the only end with which it can begin
            at = bisect_right(ends, rest) - 1
            if at >= 0 and rest.startswith(ends[at]):
                return start
        return None

    @cached_property
    def _endings(self) -> tuple[list[str], int]:
        """Ends of control tokens in order, without those that begin with another one; the largest length."""
        ends: list[str] = []
        for end in sorted({spelling[i:] for spelling in self._special for i in range(1, len(spelling))}):
            if not (ends and end.startswith(ends[-1])):
                ends.append(end)
        return ends, max(map(len, ends), default=0)
