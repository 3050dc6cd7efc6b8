"""Answers in blocks of reasoning, text and calls, for the APIs of Anthropic and of OpenAI's responses."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from metal_prefill.serve._chat import Added, Block, ChatChoice, conversation
from metal_prefill.serve._endpoint import Reply
from metal_prefill.serve._forms import ChatForm
from metal_prefill.serve._generation import generate, usage_of
from metal_prefill.serve._service import Service


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

    def end(self, choice: ChatChoice, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events at the end of an answer."""

    def whole(self, choice: ChatChoice, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the complete answer."""


def _events(format_: Format, blocks: list[Block], made: Iterable[Added]) -> Iterator[dict[str, Any]]:
    """Yield the events of texts that were added to blocks."""
    for index, text, begins in made:
        if begins:
            if index > 0:
                yield from format_.close(index - 1, blocks[index - 1])
            yield from format_.open(index, replace(blocks[index], text=""))
        yield from format_.add(index, blocks[index], text)


async def answer_in_blocks(service: Service, form: ChatForm, reply: Reply, format_: Format) -> None:
    """Answer a conversation, as a stream of events or whole.

    Once the client has the answer, it may disconnect, which cancels this call.
    """
    async with conversation(service, form, reply) as (choice,):
        has_begun = False
        async with aclosing(generate(service, [choice], format_.id, reply.begin)) as passes:
            async for made in passes:
                added = [part for _, pieces in made for part in choice.parts(pieces)]
                events = [] if has_begun else format_.begin(usage_of([choice]))
                has_begun = True
                events += _events(format_, choice.blocks, added)
                if form.stream and events:
                    await reply.events(*events)
        usage = usage_of([choice])
    if form.stream:
        last = format_.close(len(choice.blocks) - 1, choice.blocks[-1]) if choice.blocks else []
        await reply.events(*last, *format_.end(choice, usage))
        await reply.end_of_events()
    else:
        await reply.json(format_.whole(choice, usage))
