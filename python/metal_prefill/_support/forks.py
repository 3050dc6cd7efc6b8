"""Objects that are renewed in a forked process, which has only the thread that forked."""

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

_renewals: WeakKeyDictionary[object, Callable[[Any], None]] = WeakKeyDictionary()


def renew_in_child(thing: object, renew: Callable[[Any], None]) -> None:
    """Call a method of an object in each forked process, such as one that replaces locks.

    Another thread of the parent may have held a lock, and does not exist in the child to release it.
    """
    _renewals[thing] = renew


def _renew() -> None:
    for thing, renew in list(_renewals.items()):
        renew(thing)


os.register_at_fork(after_in_child=_renew)
