"""The end of the threads that read data, before the interpreter's own end.

The destructor of a dataset's iterator waits for the iterator's threads, and one of
these may be in a Python function (`from_generator`, `numpy_function`), which needs the
interpreter's lock to return. While the interpreter ends, no other thread gets the lock:
the process waits for ever (plain Keras does, too). What keeps an iterator so long is an
error that left `fit`: its traceback holds the frames of the call.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator

from kerasdist.transport.liveness.final_error import final_exception

_failed = False


@contextlib.contextmanager
def ending_threads_after_error() -> Iterator[None]:
    """End the threads at the process's exit if the block raises."""
    global _failed
    try:
        yield
    except BaseException:
        _failed = True
        raise


def destroy_iterators() -> None:
    """Destroy the iterators that an error keeps, if a block above has raised.

    Called at the process's exit. It waits for functions that read data.
    """
    if not _failed:
        return
    error = final_exception()
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # Keras leaves its own frames out of the traceback, not out of these.
            for caller, _ in traceback.walk_stack(frame):
                with contextlib.suppress(RuntimeError):  # it runs
                    caller.clear()
        error = error.__cause__ or error.__context__
    # An error that was caught is perhaps part of a cycle.
    gc.collect()
