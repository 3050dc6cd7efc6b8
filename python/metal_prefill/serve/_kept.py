"""Conversations that a request can continue by the id of their last answer."""

from collections import OrderedDict

import msgspec

from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._forms import Message

MOST_KEPT = 64 << 20  # bytes of all of them


class KeptConversations:
    """Conversations of earlier responses, by prefix namespace and id, the least recently used first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._size = 0

    def add(self, namespace: str, id_: str, messages: list[Message]) -> None:
        """Keep a conversation, and drop others that are too many."""
        raw = msgspec.json.encode(messages)
        self._kept[namespace, id_] = raw
        self._size += len(raw)
        while self._size > MOST_KEPT:
            self._size -= len(self._kept.popitem(last=False)[1])

    def find(self, namespace: str, id_: str) -> list[Message]:
        """Return a conversation; raise `ApiError` if it is not kept."""
        if (raw := self._kept.get((namespace, id_))) is None:
            raise ApiError(
                f"Previous response with id {id_!r} not found: this server keeps the latest ones in memory",
                status=404,
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._kept.move_to_end((namespace, id_))
        return msgspec.json.decode(raw, type=list[Message])
