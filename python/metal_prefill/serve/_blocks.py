"""Answers in blocks, as the APIs of Anthropic and of OpenAI's responses have them: reasoning, text, calls."""

from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from metal_prefill.serve._chat import ChatChoice, conversation
from metal_prefill.serve._endpoint import Reply
from metal_prefill.serve._forms import ChatForm
from metal_prefill.serve._generation import generate, usage_of
from metal_prefill.serve._service import Service

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    kind: Kind
    text: str = ""  # its text so far; of a call, the arguments as JSON
    # Of a call.
    call_id: str = ""
    name: str = ""


class Format(Protocol):
    """An answer in the format of one of the APIs."""

    id: str

    def begin(self, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events at the start of an answer, when its first tokens are known."""

    def open(self, index: int, block: Block) -> list[dict[str, Any]]:
        """Return the events of a block that begins, and has no text."""

    def add(self, index: int, block: Block, text: str) -> list[dict[str, Any]]:
        """Return the events of text that was added to a block."""

    def close(self, index: int, block: Block) -> list[dict[str, Any]]:
        """Return the events of a block that ends."""

    def end(self, blocks: list[Block], choice: ChatChoice, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events at the end of an answer."""

    def whole(self, blocks: list[Block], choice: ChatChoice, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the complete answer."""


class _Blocks:
    """Blocks of an answer, and the events that report them."""

    def __init__(self, format_: Format) -> None:
        self.all: list[Block] = []
        self._format = format_
        self._is_open = False

    def take(self, part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Add a part of :meth:`ChatChoice.parts`."""
        if "tool_calls" in part:
            (call,) = part["tool_calls"]
            block = Block("call", "", call["id"], call["function"]["name"]) if "id" in call else self.all[-1]
            yield from self._add(block, call["function"]["arguments"])
        elif "content" in part:
            yield from self._add(Block("text"), part["content"])
        else:
            yield from self._add(Block("reasoning"), part["reasoning_content"])

    def _add(self, new: Block, text: str) -> Iterator[dict[str, Any]]:
        continues = self._is_open and (new is self.all[-1] or new.kind == self.all[-1].kind != "call")
        if not continues:
            yield from self.close()
            self.all.append(new)
            self._is_open = True
            yield from self._format.open(len(self.all) - 1, new)
        self.all[-1].text += text
        yield from self._format.add(len(self.all) - 1, self.all[-1], text)

    def close(self) -> Iterator[dict[str, Any]]:
        if self._is_open:
            self._is_open = False
            yield from self._format.close(len(self.all) - 1, self.all[-1])


async def answer_in_blocks(service: Service, form: ChatForm, reply: Reply, format_: Format) -> None:
    """Answer a conversation, as a stream of events or whole.

    Once the client has the answer, it may disconnect, which cancels this call.
    """
    blocks = _Blocks(format_)
    async with conversation(service, form, reply) as (choice,):
        has_begun = False
        async with aclosing(generate(service, [choice], format_.id, reply.begin)) as passes:
            async for made in passes:
                parts = [part for _, pieces in made for part in choice.parts(pieces)]
                events = [] if has_begun else format_.begin(usage_of([choice]))
                has_begun = True
                events += [event for part in parts for event in blocks.take(part)]
                if form.stream and events:
                    await reply.events(*events)
        usage = usage_of([choice])
    last = list(blocks.close())
    if form.stream:
        await reply.events(*last, *format_.end(blocks.all, choice, usage))
        await reply.end_of_events()
    else:
        await reply.json(format_.whole(blocks.all, choice, usage))
