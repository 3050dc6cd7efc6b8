"""Constraints on a text: which tokens may come next, and which must. llguidance implements the rules."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, proxy

from metal_prefill.errors import ConstraintError, MissingExtraError
from metal_prefill.generation._constraint_check import check_source, try_out
from metal_prefill.generation._constraint_worker import Spelling, compile_source, prepare

if TYPE_CHECKING:
    from metal_prefill.text._tokenizer import Tokenizer

MOST_KEPT = 64  # constraints of a vocabulary that are compiled once for all texts
_SHOWN = 200  # characters of a message


class _TokenizerSpelling(Spelling):
    """The vocabulary of a tokenizer, with its way to write a forced string in tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        super().__init__(
            [tokenizer.token_bytes(i) for i in ids],
            [i for i in ids if tokenizer.is_special(i)],
            sorted(tokenizer.stop_ids),
        )
        self._tokenizer = proxy(tokenizer)  # which the prepared vocabulary must not keep alive

    def __call__(self, text: bytes | str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(
            text.decode("utf-8") if isinstance(text, bytes) else text, add_bos=False
        )
        return ids


class _Vocabulary:
    """A tokenizer prepared for constraints, and the constraints that were compiled for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._spelling = _TokenizerSpelling(tokenizer)
        self._prepared = prepare(self._spelling)
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], _Compiled | ConstraintError] = OrderedDict()

    def compiled(self, kind: str, source: str) -> _Compiled:
        """Return a compiled constraint, which is kept for further texts, as its error is."""
        key = (kind, source)
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
        if known is None:
            try:
                check_source(kind, source)
                known = _Compiled(self._prepared, self._spelling, kind, source)
            except ConstraintError as error:
                known = error.with_traceback(None)
            with self._lock:
                self._known[key] = known
                while len(self._known) > MOST_KEPT:
                    self._known.popitem(last=False)
        if isinstance(known, ConstraintError):
            raise ConstraintError(*known.args)
        return known


class _Compiled:
    """A constraint at its beginning.

    Attributes
    ----------
    matcher : llguidance.LLMatcher
        To be copied, never advanced.
    mask : bytes
        Of the first token.
    """

    def __init__(self, prepared: Any, spelling: Spelling, kind: str, source: str) -> None:
        error = try_out(spelling, kind, source)
        if error:
            raise ConstraintError(_message(kind, error))
        self.kind = kind
        self.matcher = compile_source(prepared, kind, source)
        self.mask: bytes = self.matcher.compute_bitmask()
        check_matcher(self.matcher, kind)


def _message(kind: str, error: str) -> str:
    error = " ".join(error.split())
    if error.startswith("NoExtensionBias"):
        error = "no text satisfies it"
    return f"{kind}: {error[:_SHOWN]}"


def check_matcher(matcher: Any, kind: str) -> None:
    """Raise the error of a matcher, if it has one.

    Raises
    ------
    KeyboardInterrupt
        It arrived while the matcher had the tokenizer write a string in tokens, which llguidance takes for a
        failure of the tokenizer.
    ConstraintError
        Any other error.
    """
    if not matcher.is_error():
        return
    error = matcher.get_error()
    if error.startswith("panic: ") and "PyErr { type: <class 'KeyboardInterrupt'>" in error[:200]:
        raise KeyboardInterrupt
    raise ConstraintError(_message(kind, error))


_vocabularies: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    """Prepare a tokenizer for constraints, which takes a moment the first time."""
    if (known := _vocabularies.get(tokenizer)) is not None:
        return known
    try:
        vocabulary = _Vocabulary(tokenizer)
    except ImportError as error:
        raise MissingExtraError(
            "constrained output needs the package llguidance: pip install 'metal_prefill[guide]'"
        ) from error
    return _vocabularies.setdefault(tokenizer, vocabulary)


class Constraint:
    """The constraint of one text, token by token.

    Parameters
    ----------
    tokenizer
        Of the model.
    json_schema
        The text is JSON that a schema describes: a mapping, or its JSON.
    regex
        The whole text matches it.
    grammar
        Lark grammar, from its rule `start`.

    Raises
    ------
    ValueError
        More than one of them is given.
    ConstraintError
        It cannot be read, takes too much time, memory or depth to compile, or nothing satisfies it.
    MissingExtraError
        llguidance is not installed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> None:
        given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
        sources = {kind: source for kind, source in given.items() if source is not None}
        if len(sources) != 1:
            raise ValueError(f"a text has one constraint at most, got {' and '.join(sources)}")
        ((self._kind, source),) = sources.items()
        try:
            text = source if isinstance(source, str) else json.dumps(source)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConstraintError(f"{self._kind}: {error}") from None
        self._compiled = _vocabulary(tokenizer).compiled(self._kind, text)
        self._matcher: Any = self._compiled.matcher.deep_copy()
        self._taken: list[int] = []
        self._mask: bytes | None = self._compiled.mask  # of the next token, once it is known

    def _check(self) -> None:
        check_matcher(self._matcher, self._kind)

    def take(self, token: int) -> None:
        """Continue with a token that the mask allows."""
        self._mask = None
        self._taken.append(token)
        self._matcher.consume_token(token)
        self._check()

    def forced(self) -> list[int]:
        """Return the tokens that must come next: at each of them the mask allows no other."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        return tokens

    def ahead(self, drafts: Sequence[int]) -> list[bytes]:
        """Return the mask after each draft, up to one that is not allowed or ends the text."""
        masks: list[bytes] = []
        if not drafts:
            return masks
        # With the matcher itself, not a copy: it remembers what it works out for a mask.
        matcher, taken = self._matcher, 0
        for draft in drafts[: matcher.validate_tokens(list(drafts))]:
            matcher.consume_token(draft)
            taken += 1
            if matcher.is_stopped():
                break
            mask = matcher.compute_bitmask()
            if matcher.is_error():  # such as too complex; not an error of the text
                break
            masks.append(mask)
        if not matcher.rollback(taken):
            self._matcher = self._compiled.matcher.deep_copy()
            self._matcher.consume_tokens(self._taken)
        return masks

    def mask(self) -> bytes:
        """Return which tokens may come next, a bit for each, in words of 32 from the lowest bit on."""
        if self._mask is None:
            mask: bytes = self._matcher.compute_bitmask()
            self._check()
            self._mask = mask
        return self._mask

    @property
    def complete(self) -> bool:
        """Whether the constraint is met and nothing can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def met(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())
