"""Pipe of spaCy that finds entities with a model for token classification, once both packages are installed.

>>> import spacy
>>> nlp = spacy.blank("en")
>>> nlp.add_pipe("metal_prefill", config={"model": "dslim/bert-base-NER"})
>>> [(entity.text, entity.label_) for entity in nlp("Angela Merkel lives in Berlin.").ents]
[('Angela Merkel', 'PER'), ('Berlin', 'LOC')]

With ``labels``, a model of GLiNER finds entities of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from spacy.language import Language
from spacy.util import filter_spans, minibatch

from metal_prefill.model import Model
from metal_prefill.tasks import Entity


class EntityPipe:
    """Sets ``doc.ents``; documents of a batch go through the model together.

    An entity covers whole tokens of spaCy: one that ends within a token includes the token. Overlapping
    entities are reduced to the longest.
    """

    def __init__(self, entities_of: Callable[[list[str]], list[list[Entity]]]) -> None:
        self._entities_of = entities_of

    def __call__(self, doc: Any) -> Any:
        """Set the entities of a document, and return it."""
        (doc,) = self._labelled([doc])
        return doc

    def pipe(self, stream: Iterable[Any], *, batch_size: int) -> Iterator[Any]:
        """Set the entities of documents, and yield them."""
        for batch in minibatch(stream, size=batch_size):
            yield from self._labelled(batch)

    def _labelled(self, docs: list[Any]) -> list[Any]:
        for doc, entities in zip(docs, self._entities_of([doc.text for doc in docs]), strict=True):
            spans = (
                doc.char_span(entity.start, entity.end, label=entity.label, alignment_mode="expand")
                for entity in entities
            )
            doc.ents = filter_spans([span for span in spans if span is not None])
        return docs


@Language.factory(  # type: ignore[misc,untyped-decorator,unused-ignore]
    "metal_prefill",
    assigns=["doc.ents", "token.ent_iob", "token.ent_type"],
    default_config={
        "strategy": "first",
        "labels": None,
        "threshold": 0.5,
        "truncate": "error",
        "model_options": {},
    },
)
def create_pipe(
    nlp: Any,
    name: str,
    model: str,
    strategy: str,
    labels: list[str] | None,
    threshold: float,
    truncate: str,
    model_options: dict[str, Any],
) -> EntityPipe:
    """Return the pipe.

    Without `labels`, `strategy` is that of :meth:`metal_prefill.Model.label_tokens`. With them, `threshold`
    is that of :meth:`metal_prefill.Model.find_entities`.
    """
    opened = Model(model, **model_options)
    if labels is None:
        return EntityPipe(partial(opened.label_tokens, strategy=strategy, truncate=truncate))
    find = partial(opened.find_entities, labels=labels, threshold=threshold, truncate=truncate)
    return EntityPipe(find)
