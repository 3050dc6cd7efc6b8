"""Conversations over a session whose cache is reused from turn to turn."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from inspect import GEN_RUNNING, getgeneratorstate
from typing import TYPE_CHECKING, Any

from metal_prefill.errors import SessionBusyError, StateError
from metal_prefill.text._tool_calls import ToolCall, ToolCallParser

if TYPE_CHECKING:
    from metal_prefill.generation._text_generation import FinishReason, Piece
    from metal_prefill.model import Model

# If a conversation exceeds the context, its oldest turns are dropped until it fills this fraction of it.
# Dropping several at once leaves room for several turns, which can reuse the cache.
_KEPT = 0.5


class Conversation:
    """Conversation between a user and a model.

    Parameters
    ----------
    model
        Model, on which the conversation opens its own session.
    system
        System message.
    tools
        Tools that the model may call, as for :meth:`metal_prefill.text.Tokenizer.apply_chat_template`. Its
        calls are in :attr:`calls`; :meth:`answer_calls` takes their results.
    max_context
        As in :meth:`metal_prefill.Model.session`.

    Attributes
    ----------
    messages : list of dict
        Role and content of each message, oldest first; an assistant's calls are in its ``tool_calls``.
    session : Session
        The session that holds the conversation's cache.
    forgotten : int
        Number of messages that were dropped from `messages` to make room for the last answer.
    finish_reason : str or None
        Reason that the last answer ended, as for :class:`metal_prefill.Piece`; None if interrupted.

    Raises
    ------
    ChatTemplateError
        There are tools, but the model's template does not support them.

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
        model.engine.check_generates()
        self._model = model
        self._tools = list(tools) if tools else None
        if self._tools:
            model.tokenizer.check_tools(self._tools)
        self.session = model.session(max_context=max_context)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.forgotten = 0
        self.finish_reason: FinishReason | None = None
        self._unfinished: Generator[Piece, None, None] | None = None

    @property
    def calls(self) -> list[ToolCall]:
        """Tool calls of the last answer, in order; empty once they are answered."""
        last = self.messages[-1] if self.messages else {}
        return [ToolCall.from_message(call) for call in last.get("tool_calls", ())]

    def answer(self, text: str, max_tokens: int = 256, **options: Any) -> Generator[str, None, None]:
        """Send a message, and yield the answer as it is generated.

        If the iterator is closed or interrupted by Ctrl-C, or the next answer begins, or the conversation is
        saved, the text yielded so far becomes the answer. If there is none, or an error occurs, the
        conversation is unchanged.

        Parameters
        ----------
        text
            User message.
        max_tokens
            Maximum length of the answer in tokens.
        options
            Options of :meth:`metal_prefill.Session.generate`, except `echo`. The template's stop strings are
            added to `stop`.

        Raises
        ------
        ContextOverflowError
            The message alone does not fit the context.
        ChatTemplateError
            The model's template rejects the conversation.
        SessionBusyError
            Another answer is being computed, in another thread or in the call of `progress`; or the
            conversation was continued, saved or replaced before this answer was complete.
        """
        return self._texts([{"role": "user", "content": text}], max_tokens, options)

    def stream(
        self, text: str, max_tokens: int = 256, *, logprobs: int | None = None, **options: Any
    ) -> Generator[Piece, None, None]:
        """Send a message, and yield each token of the answer as :meth:`metal_prefill.Session.stream` does.

        Parameters and errors are those of :meth:`answer`, and `logprobs` is that of
        :meth:`metal_prefill.Session.stream`. Tokens of a call have no text.
        """
        said = [{"role": "user", "content": text}]
        return self._reply(said, max_tokens, {**options, "logprobs": logprobs})

    def answer_calls(
        self, results: Sequence[Any], max_tokens: int = 256, **options: Any
    ) -> Generator[str, None, None]:
        """Send the results of the last answer's calls, and yield the next answer as it is generated.

        Parameters
        ----------
        results
            One result for each of :attr:`calls`, in order: text, or a value that is encoded as JSON.
        max_tokens, options
            As for :meth:`answer`.

        Raises
        ------
        ValueError
            There are no calls, or their number differs from that of the results.
        TypeError
            A result is neither text nor a JSON value.
        SessionBusyError
            As for :meth:`answer`.
        """
        self._end()
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
        """End an answer that was left unfinished, and yield the tokens of the next one."""
        self._end()
        reply = self._unfinished = self._appended(said, max_tokens, options)
        reason: FinishReason | None = None
        with closing(reply):
            for piece in reply:
                reason = piece.finish_reason
                yield piece
        if reason is None and self._unfinished is not reply:
            raise SessionBusyError("this answer ended where the conversation was continued or replaced")

    def _end(self) -> None:
        """End an answer that was left unfinished. Raises SessionBusyError if it is being computed."""
        busy = "an answer of this conversation is being computed"
        if self._unfinished is not None:
            if getgeneratorstate(self._unfinished) == GEN_RUNNING:
                raise SessionBusyError(busy)
            try:
                self._unfinished.close()
            except ValueError:  # another thread has just continued it
                raise SessionBusyError(busy) from None
        self._unfinished = None

    def _appended(
        self, said: list[dict[str, Any]], max_tokens: int, options: dict[str, Any]
    ) -> Generator[Piece, None, None]:
        """Append messages, and yield the tokens of the answer, without the text of calls."""
        if options.get("echo"):
            raise ValueError("echo is not supported in a conversation")
        before, made, calls, whole = list(self.messages), "", list[ToolCall](), False
        forgotten = self.forgotten
        parser = ToolCallParser(self._tools) if self._tools else None
        self.messages += said
        try:
            tokens = self._fit(max_tokens)
            stop = self._model.tokenizer.chat_stop(options.get("stop"))
            options = {**options, "stop": stop, "calls": parser is not None}
            for piece in self.session.stream(tokens, max_tokens, **options):
                self.finish_reason = piece.finish_reason
                if parser is not None:
                    parts = parser.step(piece.text, last=piece.finish_reason is not None)
                    calls += [part.with_id for part in parts if isinstance(part, ToolCall)]
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
                self.messages, self.forgotten = before, forgotten

    def _fit(self, max_tokens: int) -> list[int]:
        """Return the tokens of the conversation; drop its oldest turns if it is too long."""
        limit = self.session.max_context
        self.forgotten = 0
        tokens = self._tokens()
        if len(tokens) + min(max_tokens, limit // 4) <= limit:
            return tokens
        first = 1 if self.messages[0]["role"] == "system" else 0
        while len(tokens) > limit * _KEPT:
            # Whole turns: templates may require alternating roles, and calls before their results.
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
        """Remove all messages except the system message.

        Raises
        ------
        SessionBusyError
            An answer is being computed, in another thread or in the call of `progress`.
        """
        self._end()
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """End an unfinished answer, and save the messages and the cache to a file.

        Raises
        ------
        SessionBusyError
            As for :meth:`reset`. See also :meth:`metal_prefill.Session.save`.
        """
        self._end()
        self.session.notes = json.dumps(self.messages, ensure_ascii=False)
        self.session.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace this conversation with a saved one; it is unchanged if an error occurs.

        Raises
        ------
        StateError
            The file contains no conversation. See also :meth:`metal_prefill.Model.load_session`.
        SessionBusyError
            As for :meth:`reset`.
        """
        session = self._model.load_session(path, max_context=self.session.max_context)
        try:
            messages = [_loaded(message) for message in json.loads(session.notes)]
            self._end()
        except SessionBusyError:
            session.close()
            raise
        except (ValueError, TypeError, KeyError, RecursionError):
            session.close()
            raise StateError(f"{path}: contains a session, but no conversation") from None
        self.session.close()
        self.session, self.messages = session, messages

    def close(self) -> None:
        """Free the cache."""
        self.session.close()


def _loaded(message: Any) -> dict[str, Any]:
    """Validate a message of a saved conversation; raise `TypeError` or `KeyError` if it is invalid."""
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not isinstance(content, (str, list, type(None))):
        raise TypeError
    loaded: dict[str, Any] = dict(message)
    if "tool_calls" in message:
        loaded["tool_calls"] = [ToolCall.from_message(c).as_message() for c in message["tool_calls"]]
    return loaded
