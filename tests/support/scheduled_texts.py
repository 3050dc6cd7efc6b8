"""Computes texts with the scheduler, and the same texts separately."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from metal_prefill import Model, Scheduler
from metal_prefill.generation import Stream

TEXTS = ["ROMEO:\nBut soft", "JULIET:\n", "First Citizen:\nWe are", "KING:\nO my lord, what"]


def alone(model: Model, prompt: Any, max_tokens: int, **options: Any) -> str:
    """Continue a prompt in a separate session."""
    with model.session() as session:
        return "".join(session.generate(prompt, max_tokens, **options))


def tokens_alone(model: Model, prompt: Any, n: int) -> list[int]:
    """Compute the most probable tokens after a prompt, each once the previous one is known."""
    with model.session() as session:
        tokens = [session.forward_prompt(prompt)]
        while len(tokens) < n:
            tokens.append(session.forward_token_greedy(tokens[-1]))
    return tokens


def answer_alone(model: Model, messages: list[Any], max_tokens: int, **options: Any) -> str:
    """Answer a conversation in a separate session."""
    prompt = model.tokenizer.apply_chat_template(messages)
    return alone(model, prompt, max_tokens, stop=model.tokenizer.chat_stop(), **options)


def texts_of(pieces: Any, n: int) -> list[str]:
    """Join the pieces of each prompt."""
    texts = [""] * n
    for index, piece in pieces:
        texts[index] += piece
    return texts


def tokens_of_many(model: Model, prompts: list[Any], max_tokens: int, **options: Any) -> list[list[int]]:
    """Continue prompts together, and return the tokens of each text."""
    texts: list[list[int]] = [[] for _ in prompts]
    for index, piece in model.stream_many(prompts, max_tokens, **options):
        assert not isinstance(piece, Exception)
        texts[index].append(piece.token)
    return texts


def finish(scheduler: Scheduler, begun: Mapping[Stream, str] | Iterable[Stream] = ()) -> dict[Stream, str]:
    """Compute passes until all streams have ended; return their texts. Streams may have begun earlier."""
    texts = defaultdict(str, begun if isinstance(begun, Mapping) else dict.fromkeys(begun, ""))
    while scheduler.busy:
        for stream, text in scheduler.step():
            texts[stream] += text
    return texts


def passes_until_it_ends(scheduler: Scheduler, stream: Stream) -> list[int]:
    """Return the rows of each pass until a stream has ended."""
    rows = []
    while stream.finish_reason is None:
        scheduler.step()
        rows.append(scheduler.last_pass.writing + scheduler.last_pass.prompts)
    return rows
