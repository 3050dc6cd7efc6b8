"""Conversations: messages over a session whose cache is used again turn by turn."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from metal_prefill.errors import StateError
from metal_prefill.text._tool_calls import ToolCall, ToolCallParser

if TYPE_CHECKING:
    from metal_prefill.generation._text_generation import FinishReason, Piece
    from metal_prefill.model import Model
    from metal_prefill.session import Session

# When a conversation outgrows the context, its oldest turns are forgotten until this part of it is in use:
# the room that is won lasts for several turns, each of which can use the cache again.
_KEPT = 0.5


class Conversation:
    """Messages between a user and a model.

    Parameters
    ----------
    model
        The conversation makes a session of its own.
    system
        Instructions to the model, before the first message.
    tools
        What the model may call, as for :meth:`metal_prefill.text.Tokenizer.apply_chat_template`. Its
        calls are in :attr:`calls`, and :meth:`answer_calls` says what came of them.
    max_context
        As in :meth:`metal_prefill.Model.session`.

    Attributes
    ----------
    messages : list of dict
        Role and content of each message, oldest first; an assistant's calls are in its ``tool_calls``.
    forgotten : int
        Messages that the last answer had no room for; they are no longer in `messages`.
    finish_reason : str or None
        Why the last answer ended, as for :class:`metal_prefill.Piece`; None where it was interrupted.

    Raises
    ------
    ChatTemplateError
        There are tools, and the model's template takes none.

    Examples
    --------
    >>> chat = Conversation(model, system="Be brief.")
    >>> for text in chat.answer("What is a prefix?"):
    ...     print(text, end="", flush=True)
    """

    def __init__(
        self,
        model: Model,
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_context: int | None = None,
    ) -> None:
        self._model = model
        self._tools = list(tools) if tools else None
        if self._tools:
            model.tokenizer.check_tools(self._tools)
        self._session = model.session(max_context=max_context)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.forgotten = 0
        self.finish_reason: FinishReason | None = None

    @property
    def session(self) -> Session:
        """The session that holds the conversation's cache."""
        return self._session

    @property
    def calls(self) -> list[ToolCall]:
        """Calls that the last answer asks for, in order; empty once they are answered."""
        last = self.messages[-1] if self.messages else {}
        return [ToolCall.from_message(call) for call in last.get("tool_calls", ())]

    def answer(self, text: str, max_tokens: int = 256, **options: Any) -> Generator[str, None, None]:
        """Say something, and yield the answer as it is made.

        If the iterator is closed or Ctrl-C interrupts it, the text yielded so far counts as the answer. If
        there is none, or an error occurs, the conversation is as it was before.

        Parameters
        ----------
        text
            The user's message.
        max_tokens
            Upper bound on the answer, in tokens.
        options
            Of :meth:`metal_prefill.Session.generate`, but for `echo`. The template's own ends are added to
            `stop`.

        Raises
        ------
        ContextOverflowError
            The message alone does not fit into the context.
        ChatTemplateError
            The model's template refuses the conversation.
        """
        return self._texts([{"role": "user", "content": text}], max_tokens, options)

    def stream(
        self, text: str, max_tokens: int = 256, *, logprobs: int | None = None, **options: Any
    ) -> Generator[Piece, None, None]:
        """Say something, and yield each token of the answer as :meth:`metal_prefill.Session.stream` does.

        Parameters and errors are those of :meth:`answer`, and `logprobs` is that of
        :meth:`metal_prefill.Session.stream`. Tokens of a call have no text.
        """
        said = [{"role": "user", "content": text}]
        return self._reply(said, max_tokens, {**options, "logprobs": logprobs})

    def answer_calls(
        self, results: Sequence[Any], max_tokens: int = 256, **options: Any
    ) -> Generator[str, None, None]:
        """Say what came of the calls of the last answer, and yield the next answer as it is made.

        Parameters
        ----------
        results
            One for each of :attr:`calls`, in their order: text, or what becomes JSON.
        max_tokens, options
            As for :meth:`answer`.

        Raises
        ------
        ValueError
            There are no calls, or more or fewer results than calls.
        TypeError
            A result is neither text nor of JSON's types.
        """
        calls = self.calls
        if not calls:
            raise ValueError("the last answer calls no tools")
        if len(results) != len(calls):
            raise ValueError(f"the last answer has {len(calls)} calls, got {len(results)} results")
        said = []
        for call, result in zip(calls, results, strict=True):
            content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            name = {} if call.id is None else {"tool_call_id": call.id}
            said.append({"role": "tool", "name": call.name, **name, "content": content})
        return self._texts(said, max_tokens, options)

    def _texts(
        self, said: list[dict[str, Any]], max_tokens: int, options: dict[str, Any]
    ) -> Generator[str, None, None]:
        with closing(self._reply(said, max_tokens, options)) as pieces:
            for piece in pieces:
                if piece.text:
                    yield piece.text

    def _reply(
        self, said: list[dict[str, Any]], max_tokens: int, options: dict[str, Any]
    ) -> Generator[Piece, None, None]:
        """Add messages, and yield the tokens of the answer to them, with the text that is no call."""
        if options.get("echo"):
            raise ValueError("echo: an answer does not begin with the conversation")
        before, made, calls, whole = list(self.messages), "", list[ToolCall](), False
        parser = ToolCallParser(self._tools) if self._tools else None
        self.messages += said
        try:
            tokens = self._fit(max_tokens)
            stop = options.get("stop", ())
            stops = [stop] if isinstance(stop, (str, int)) else list(stop)
            options = {**options, "stop": [*self._model.tokenizer.chat_stop, *stops]}
            for piece in self._session.stream(tokens, max_tokens, **options):
                self.finish_reason = piece.finish_reason
                if parser is not None:
                    parts = parser.step(piece.text) + (parser.flush() if piece.finish_reason else [])
                    calls += [part for part in parts if isinstance(part, ToolCall)]
                    piece = replace(piece, text="".join(part for part in parts if isinstance(part, str)))
                made += piece.text
                yield piece
            whole = True
        except (KeyboardInterrupt, GeneratorExit):
            whole = made != "" or calls != []
            raise
        finally:
            if whole:
                answer: dict[str, Any] = {"role": "assistant", "content": made}
                if calls:
                    answer["tool_calls"] = [call.as_message() for call in calls]
                self.messages.append(answer)
            else:
                self.messages = before

    def _fit(self, max_tokens: int) -> list[int]:
        """Return the tokens of the conversation; its oldest turns are forgotten where it is too long."""
        limit = self._session.max_context
        self.forgotten = 0
        tokens = self._tokens()
        if len(tokens) + min(max_tokens, limit // 4) <= limit:
            return tokens
        first = 1 if self.messages[0]["role"] == "system" else 0
        while len(tokens) > limit * _KEPT:
            # Turns: templates may insist on user and assistant in turn, and on calls before their results.
            turns = [i for i, m in enumerate(self.messages) if m["role"] == "user" and i > first]
            if not turns:
                break
            del self.messages[first : turns[0]]
            self.forgotten += turns[0] - first
            tokens = self._tokens()
        return tokens

    def _tokens(self) -> list[int]:
        return self._model.tokenizer.apply_chat_template(self.messages, tools=self._tools)

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write messages and cache to a file. See :meth:`metal_prefill.Session.save`."""
        self._session.notes = json.dumps(self.messages, ensure_ascii=False)
        self._session.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on with a saved conversation instead of this one, or leave this one as it is.

        Raises
        ------
        StateError
            The file holds no conversation. See also :meth:`metal_prefill.Model.load_session`.
        """
        session = self._model.load_session(path, max_context=self._session.max_context)
        try:
            self.messages = [_loaded(message) for message in json.loads(session.notes)]
        except (ValueError, TypeError, KeyError, RecursionError):
            session.close()
            raise StateError(f"{path}: holds a session, but no conversation") from None
        self._session.close()
        self._session = session

    def close(self) -> None:
        """Free the cache."""
        self._session.close()


def _loaded(message: Any) -> dict[str, Any]:
    """Check a message of a saved conversation; raises TypeError or KeyError."""
    loaded: dict[str, Any] = {"role": str(message["role"]), "content": str(message["content"])}
    loaded |= {key: str(message[key]) for key in ("name", "tool_call_id") if key in message}
    if "tool_calls" in message:
        loaded["tool_calls"] = [ToolCall.from_message(c).as_message() for c in message["tool_calls"]]
    return loaded
