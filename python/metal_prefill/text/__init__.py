"""Tokenizers, chat templates and tool calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metal_prefill._support.lazy import lazy_names

if TYPE_CHECKING:
    from metal_prefill.text._chat_template import ChatTemplate
    from metal_prefill.text._tokenizer import Tokenizer
    from metal_prefill.text._tool_calls import (
        ParsedAnswer,
        ToolCall,
        ToolCallParser,
        parse_tool_calls,
        tool_names,
    )

__all__ = [
    "ChatTemplate", "ParsedAnswer", "Tokenizer", "ToolCall", "ToolCallParser", "parse_tool_calls",
    "tool_names",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    _chat_template="ChatTemplate",
    _tokenizer="Tokenizer",
    _tool_calls="ParsedAnswer ToolCall ToolCallParser parse_tool_calls tool_names",
)
