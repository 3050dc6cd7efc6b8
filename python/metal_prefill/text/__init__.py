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
    {
        "ChatTemplate": "_chat_template",
        "ParsedAnswer": "_tool_calls",
        "Tokenizer": "_tokenizer",
        "ToolCall": "_tool_calls",
        "ToolCallParser": "_tool_calls",
        "parse_tool_calls": "_tool_calls",
        "tool_names": "_tool_calls",
    },
)
