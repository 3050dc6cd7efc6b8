"""Conversations: messages over a session whose cache is used again turn by turn."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from metal_prefill.errors import StateError

if TYPE_CHECKING:
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
    max_context
        As in :meth:`metal_prefill.Model.session`.

    Attributes
    ----------
    messages : list of dict
        Role and content of each message, oldest first.
    forgotten : int
        Messages that the last answer had no room for; they are no longer in `messages`.

    Examples
    --------
    >>> chat = Conversation(model, system="Be brief.")
    >>> for text in chat.answer("What is a prefix?"):
    ...     print(text, end="", flush=True)
    """

    def __init__(self, model: Model, *, system: str | None = None, max_context: int | None = None) -> None:
        self._model = model
        self._session = model.session(max_context=max_context)
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.forgotten = 0

    @property
    def session(self) -> Session:
        """The session that holds the conversation's cache."""
        return self._session

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
            Of :meth:`metal_prefill.Session.generate`.

        Raises
        ------
        ContextOverflowError
            The message alone does not fit into the context.
        ChatTemplateError
            The model's template refuses the conversation.
        """
        before, made, whole = list(self.messages), "", False
        self.messages.append({"role": "user", "content": text})
        try:
            tokens = self._fit(max_tokens)
            stop = self._model.tokenizer.chat_stop
            for piece in self._session.generate(tokens, max_tokens, stop=stop, **options):
                made += piece
                yield piece
            whole = True
        except (KeyboardInterrupt, GeneratorExit):
            whole = made != ""
            raise
        finally:
            if whole:
                self.messages.append({"role": "assistant", "content": made})
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
        while len(tokens) > limit * _KEPT and len(self.messages) > first + 2:
            del self.messages[first : first + 2]  # a turn: templates may insist on user and assistant in turn
            self.forgotten += 2
            tokens = self._tokens()
        return tokens

    def _tokens(self) -> list[int]:
        return self._model.tokenizer.apply_chat_template(self.messages)

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
            messages = json.loads(session.notes)
            self.messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
        except (ValueError, TypeError, KeyError, RecursionError):
            session.close()
            raise StateError(f"{path}: holds a session, but no conversation") from None
        self._session.close()
        self._session = session

    def close(self) -> None:
        """Free the cache."""
        self._session.close()
