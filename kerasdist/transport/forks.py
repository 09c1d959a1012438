"""Sockets that this process's forked children don't keep.

A child that a script forks (a pool of processes that load data, for instance) has
copies of all descriptors. While it runs, a killed worker's connections would stay open,
so the others would notice the loss by its silence only, and its port would stay in use.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class _Closable(Protocol):
    def close(self) -> None: ...


_OURS: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_children(thing: _Closable) -> None:
    """Make forked children close their copy of a socket or a file after the fork.

    The connection itself isn't shut down.
    """
    _OURS.add(thing)


def _close() -> None:
    for thing in list(_OURS):
        thing.close()
    _OURS.clear()


os.register_at_fork(after_in_child=_close)
