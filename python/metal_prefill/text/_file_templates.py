"""The chat templates of a model file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from metal_prefill._support.cached_property import cached_property
from metal_prefill.files._gguf_file import GGUFFile

if TYPE_CHECKING:
    from metal_prefill.text._chat_template import ChatTemplate

# _chat_template is imported when a conversation is rendered, since it imports jinja2.


class FileTemplates:
    """Templates of a file for conversations with and without tools, or a plain one."""

    def __init__(
        self,
        gguf: GGUFFile,  # the file
        special: Mapping[str, int],  # ids of control tokens by spelling
    ) -> None:
        self._gguf = gguf
        self._special = special

    @cached_property
    def source(self) -> str | None:
        """Jinja source of the template without tools, or None."""
        return self._source("tokenizer.chat_template")

    def _source(self, key: str) -> str | None:
        source: str | None = self._gguf.metadata.typed(key, "string", default=None)
        return source

    @cached_property
    def plain(self) -> ChatTemplate:
        """Template of conversations without tools."""
        from metal_prefill.text._chat_template import PLAIN_TEMPLATE, ChatTemplate

        return ChatTemplate(self.source or PLAIN_TEMPLATE, self._special)

    @cached_property
    def with_tools(self) -> ChatTemplate:
        """Template of conversations with tools."""
        from metal_prefill.text._chat_template import ChatTemplate

        source = self._source("tokenizer.chat_template.tool_use")
        return self.plain if source is None else ChatTemplate(source, self._special)

    @cached_property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer; empty if the file has a template, whose control tokens end it."""
        from metal_prefill.text._chat_template import PLAIN_STOP

        return () if self.source else (PLAIN_STOP,)
