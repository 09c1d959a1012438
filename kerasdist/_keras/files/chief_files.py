"""Files on several workers: the chief writes them, and the others wait for that.

    chief      model.save(p) ─ begins ── writes ── has written ─ load_model(p) ─ ...
                                  │                     │
    others     model.save(p) ─ wait ................... return ─ load_model(p) ─ ...

The chief waits for no other rank, so that it may also be the only one that saves. The
others are informed outside of collectives, see `transport.liveness.announcements`; if
the chief doesn't write at this point of the script they continue, with a warning.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasdist._keras.context import current
from kerasdist._keras.protocols import KerasHooks
from kerasdist.errors import CollectiveTimeout

_LOG = logging.getLogger("kerasdist")
_MOST_CHARACTERS = 2000
# How long until another host that shares the file system sees a new file.
_VISIBLE_SECONDS = 3.0
_LOOK_SECONDS = 0.05
_REMOTE = "hf://"


class _FilesOfProcess:
    """This process's knowledge about files.

    Attributes:
        warned: The kinds of warnings that were given.
        missing: By path: why a file that this rank has saved isn't there, and the state
            of the file that was found in its place.
    """

    warned: set[str] = set()  # noqa: RUF012 - the process's, not the class's
    missing: dict[str, tuple[str, Any]] = {}  # noqa: RUF012 - the process's


# The chief's part.


@contextlib.contextmanager
def announcing(hooks: KerasHooks, path: str) -> Iterator[None]:
    """Announce, on the chief, that the block writes a file, and how it ended."""
    announcements = hooks.workers.job.announcements
    if announcements is None or not announcements.announces:
        yield
        return
    topic = _topic(path)
    announcements.begin(topic)
    try:
        yield
    except Exception as error:
        announcements.end(topic, _facts_of(error), failed=True)
        raise
    announcements.end(topic, {"path": _key(path), "seen": _newest(path)})


def _facts_of(error: Exception) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "error": type(error).__name__,
        "text": str(error)[:_MOST_CHARACTERS],
    }
    if isinstance(error, OSError) and isinstance(error.errno, int):
        facts["errno"] = error.errno
        facts["strerror"] = str(error.strerror)[:_MOST_CHARACTERS]
    return facts


def _newest(path: str) -> list[Any] | None:
    """Return the newest file of what was written: name, size in bytes, time in ns.

    The name is empty if the path is a file. None if that can't be determined.
    """
    with contextlib.suppress(OSError, ValueError, tf.errors.OpError):
        if not tf.io.gfile.isdir(path):
            return ["", *(state_of_file(path) or ())]
        names = tf.io.gfile.listdir(path)
        found = {
            name: seen
            for name in names
            if (seen := state_of_file(os.path.join(path, name))) is not None
        }
        newest = max(found, key=lambda name: found[name][1])
        return [newest, *found[newest]]
    return None


# The others' part.


def wait_for_chief(hooks: KerasHooks, path: str, own: bool = False) -> bool:
    """Wait until the chief has written the file, or will not write it.

    Returns:
        Whether this rank must write `path`: it's in a temporary folder that the chief
        doesn't have; or, in asynchronous jobs, in one with this rank's number, to which
        the chief doesn't write; or it's a file of its `own` that doesn't exist yet, the
        chief has gone on without it, and no callback asks, whose logs may differ; or
        this rank has become the chief.

    Raises:
        Exception: The error of the chief's attempt.
        CollectiveTimeout: Writing takes the chief too long.
        CollectiveError: The job has failed.
    """
    announcements = hooks.workers.job.announcements
    if announcements is None or (hooks.dynamic and current.after_batch):
        return False
    _FilesOfProcess.missing.pop(_key(path), None)
    dynamic = None if current.fitting else hooks.dynamic
    alone = dynamic is not None and _names_rank(path, hooks.workers.rank)
    in_pass = dynamic is not None and dynamic.in_pass
    outcome = announcements.wait(_topic(path), own=alone and in_pass)
    if outcome.kind == "elsewhere":
        return True
    if outcome.kind == "gone" and alone and not outcome.known:
        return True
    if outcome.kind == "mine":
        if hooks.elastic is not None and not current.fitting:
            # In `fit` all workers learn of the change at the same point.
            with hooks.elastic.section():
                pass
        return True
    if outcome.kind == "failed":
        raise _error(outcome.facts, path)
    if outcome.kind == "busy":
        raise CollectiveTimeout(
            f"The chief has been writing a file for {announcements.seconds:g} s. "
            f"Received: filepath={path!r}. Give it more time with the strategy's "
            "`timeout=`."
        )
    if outcome.kind == "done":
        if is_temporary(path) and outcome.facts.get("path") != _key(path):
            return True  # not a copy: the chief may have removed its own
        _expect(path, outcome.facts)
        return False
    if is_temporary(path):
        return True
    # Asynchronous workers continue without a lost chief.
    left = outcome.kind == "gone" and not hooks.dynamic
    if (outcome.kind == "past" or left) and own and not current.fitting:
        return True
    why = {
        "past": "the chief has gone on without writing it",
        "gone": f"the chief can't write it any more: {outcome.reason}",
        "late": "the chief hasn't started writing it within "
        f"{announcements.seconds:g} s",
    }[outcome.kind]
    text = (
        f"Rank {hooks.workers.rank} was asked to write a file, which only the chief "
        f"does, and {why}. Received: filepath={path!r}. Save on all ranks, or on the "
        "chief (`strategy.is_chief`), to the same path."
    )
    _note_missing(path, text)
    if not current.fitting:
        _warn_once("unwritten", text)
    return False


def _expect(given: str, facts: dict[str, Any]) -> None:
    """Check that the chief's file is visible on this host."""
    seen = facts.get("seen")
    if given.startswith(_REMOTE) or not isinstance(seen, list) or len(seen) != 3:
        return
    name, size, written = seen
    path = os.path.join(given, name) if name else given
    until = time.monotonic() + _VISIBLE_SECONDS
    while True:
        found = state_of_file(path)
        # The chief, or another process, may have written it again meanwhile.
        if found is not None and (found[1] > written or found == (size, written)):
            return
        # Without a shared file system, once that is known, there is no wait.
        if "invisible" in _FilesOfProcess.warned or time.monotonic() > until:
            break
        time.sleep(_LOOK_SECONDS)
    state = "isn't there" if found is None else "is another, older one"
    text = (
        f"The chief has written {facts.get('path')!r}, and on this host the file "
        f"{state}. Received: filepath={given!r}, working directory {os.getcwd()!r}. "
        "Save to a folder that all workers share, or load the file on the chief "
        "alone."
    )
    _note_missing(given, text)
    _warn_once("invisible", text)


def any_missing() -> bool:
    """Return whether there is any path for which `why_missing` has a reason."""
    return bool(_FilesOfProcess.missing)


def why_missing(path: str | os.PathLike[str]) -> str:
    """Return why a file that this rank has saved isn't there; empty if it may be."""
    why, found = _FilesOfProcess.missing.get(_key(path), ("", None))
    return why if why and state_of_file(path) == found else ""


def _note_missing(path: str, why: str) -> None:
    _FilesOfProcess.missing[_key(path)] = why, state_of_file(path)


def _warn_once(kind: str, text: str) -> None:
    if kind not in _FilesOfProcess.warned:
        _FilesOfProcess.warned.add(kind)
        _LOG.warning("kerasdist: %s", text)


def _error(facts: dict[str, Any], path: str) -> Exception:
    """Return the chief's exception, as one of Python's own classes."""
    name, text = str(facts.get("error")), str(facts.get("text"))
    where = f"(the chief, rank 0, was writing {path!r})"
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{name}: {text} {where}")
    if issubclass(kind, OSError) and isinstance(facts.get("errno"), int):
        return kind(facts["errno"], f"{facts.get('strerror')} {where}")
    try:
        return kind(f"{text} {where}")
    except TypeError:  # its constructor needs more arguments
        return RuntimeError(f"{name}: {text} {where}")


def _names_rank(path: str, rank: int) -> bool:
    """Return whether the name of a folder in a path has a rank's number."""
    is_file = bool(os.path.splitext(path)[1])
    folder = os.path.dirname(path) if is_file else path
    return re.search(rf"(?<!\d){rank}(?!\d)", folder) is not None


def is_temporary(path: str) -> bool:
    """Return whether a part of a path was drawn by `tempfile`, by each rank its own."""
    return _topic(path) != path


def _topic(path: str) -> str:
    """Return the topic to announce a path by, without parts drawn by `tempfile`."""
    return re.sub(rf"\b{tempfile.gettempprefix()}[a-z0-9_]{{8}}\b", "*", path)


def _key(path: Any) -> str:
    text = str(os.fspath(path))
    return text if "://" in text else os.path.abspath(text)


def state_of_file(path: Any) -> tuple[int, int] | None:
    """Return the size in bytes of a file and its time in ns; None if it's missing."""
    try:
        found = tf.io.gfile.stat(str(os.fspath(path)))
    except (OSError, tf.errors.OpError):
        return None
    return int(found.length), int(found.mtime_nsec)
