"""Files on several workers: the chief writes them, and the others wait for that.

    chief      model.save(p) ─ begins ── writes ── has written ─ load_model(p) ─ ...
                                  │                     │
    others     model.save(p) ─ wait ................... return ─ load_model(p) ─ ...

The chief waits for no other rank, so that it may also be the only one that saves. The
others are informed outside of collectives, see `transport.liveness.announcements`; if
the chief doesn't write at this point of the script they continue, with a warning.

Code that only the chief runs is run outside of the strategy's scope: creating a
variable in the scope is a collective, which the others wouldn't join.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kerasdist._keras.context import current, setting
from kerasdist._keras.models.local_models import writer_hooks
from kerasdist._keras.protocols import KerasHooks, current_hooks, hooks_of
from kerasdist._tf.scopes import outside_of_scopes
from kerasdist._tf.variables import is_distributed
from kerasdist.errors import CollectiveTimeout

__all__ = [
    "finish_background",
    "load",
    "on_chief_only",
    "outside",
    "save_state",
    "write",
    "write_checkpoint",
    "write_checkpoint_state",
]

_LOG = logging.getLogger("kerasdist")
_MOST_CHARACTERS = 2000
# How long until another host that shares the file system sees a new file.
_VISIBLE_SECONDS = 3.0
_LOOK_SECONDS = 0.05
_REMOTE = "hf://"


class _Process:
    """This process's knowledge about files.

    Attributes:
        warned: The kinds of warnings that were given.
        missing: By path: why a file that this rank has saved isn't there, and the state
            of the file that was found in its place.
    """

    warned: set[str] = set()  # noqa: RUF012 - the process's, not the class's
    missing: dict[str, tuple[str, Any]] = {}  # noqa: RUF012 - the process's


def on_chief_only(
    original: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace a callback's method that writes: only the chief does it."""
    # `set_model` is called before the callback has one.
    model = callback.model if callback.model is not None else (args or [None])[0]
    hooks = writer_hooks(model) if model is not None else None
    if hooks is not None and hooks.workers.rank > 0:
        if args and args[0] is model:
            callback._model = model
        return None
    with _leaving(hooks):
        return original(callback, *args, **kwargs)


def save_state(
    original: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace a method as `on_chief_only` does, for a callback that also saves metrics.

    Each worker's variables hold its part of them: all workers take part in their sum.
    """
    hooks = writer_hooks(callback.model)
    if hooks is not None and hooks.workers.rank > 0:
        for variable in callback.model.metrics_variables:
            variable.numpy()
        return None
    return on_chief_only(original, callback, *args, **kwargs)


def write(original: Callable[..., Any], saved: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace what saves a model or an archive: the others wait for the chief."""
    hooks = writer_hooks(saved)
    if hooks is None or current.writing:
        return original(saved, *args, **kwargs)
    bound = inspect.signature(original).bind(saved, *args, **kwargs)
    path = bound.arguments.get("filepath")
    if not isinstance(path, (str, os.PathLike)):
        # An open file: each rank has its own.
        with _leaving(hooks):
            return original(saved, *args, **kwargs)
    path = str(os.fspath(path))
    if hooks.workers.rank > 0:
        if _wait(hooks, path, own=_look_at(path) is None):
            with setting(writing=True), _leaving(hooks):
                return original(saved, *args, **kwargs)
        return None
    with setting(writing=True), _leaving(hooks), _announcing(hooks, path):
        return original(saved, *args, **kwargs)


def write_checkpoint(
    original: Callable[..., Any], saved: Any, file_prefix: str, options: Any = None
) -> str:
    """Replace the writing of `tf.train.Checkpoint`: the others wait for the chief.

    TensorFlow merges a checkpoint's files in a temporary folder, to which all ranks
    would give the same name: the second rank would find nothing there.
    """
    variables = [] if current.writing or current.local else _distributed_in(saved)
    hooks = hooks_of(variables[0].distribute_strategy) if variables else None
    if hooks is None:
        return str(original(saved, file_prefix, options))
    folder = os.path.dirname(file_prefix) or "."
    with setting(writing=True), _leaving(hooks):
        if hooks.workers.rank == 0:
            with _announcing(hooks, folder):
                return str(original(saved, file_prefix, options))
        summed = any(
            v.synchronization == tf.VariableSynchronization.ON_READ for v in variables
        )
        if summed:
            # Reading metrics sums them over all workers, so all must take part.
            with tempfile.TemporaryDirectory() as unused:
                original(saved, os.path.join(unused, "checkpoint"), options)
        # Metrics can't be read again, because the chief has gone on.
        own = not summed and _look_at(f"{file_prefix}.index") is None
        if _wait(hooks, folder, own=own):
            return str(original(saved, file_prefix, options))
    # Keep a checkpoint manager's list of checkpoints.
    with setting(following=True):
        for call in getattr(options, "experimental_write_callbacks", None) or ():
            call(*[file_prefix][: len(inspect.signature(call).parameters)])
    return file_prefix


def write_checkpoint_state(
    original: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Replace the naming of a folder's latest checkpoint: only the chief does it."""
    if not current.following:
        original(*args, **kwargs)


def _distributed_in(saved: Any) -> list[Any]:
    """Return the distributed variables in a checkpoint, Keras's among them."""
    found = tf.train.TrackableView(saved).descendants()
    variables = [getattr(one, "_value", one) for one in found]
    return [variable for variable in variables if is_distributed(variable)]


def finish_background(
    original: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace the wait for files that are written in the background."""
    model = callback.model
    hooks = None if model is None else writer_hooks(model)
    if hooks is None:
        return original(callback, *args, **kwargs)
    path = str(callback.directory)
    if hooks.workers.rank == 0:
        with _announcing(hooks, path):
            return original(callback, *args, **kwargs)
    original(callback, *args, **kwargs)
    _wait(hooks, path)
    return None


def outside(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function that may be called on one rank alone outside of the scope."""
    with _leaving(current_hooks()):
        return original(*args, **kwargs)


def load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace what loads a file: explain why it is missing.

    Raises:
        ValueError: This rank has saved it, and can't see the file that the chief has
            written; or the chief has written none.
    """
    if _Process.missing:
        path = inspect.signature(original).bind(*args, **kwargs).arguments["filepath"]
        if isinstance(path, (str, os.PathLike)):
            why, found = _Process.missing.get(_key(path), ("", None))
            if why and _look_at(path) == found:
                raise ValueError(why)
    return original(*args, **kwargs)


@contextlib.contextmanager
def _leaving(hooks: KerasHooks | None) -> Iterator[None]:
    """Leave the scope of a strategy of kerasdist."""
    with contextlib.nullcontext() if hooks is None else outside_of_scopes():
        yield


# The chief's part.


@contextlib.contextmanager
def _announcing(hooks: KerasHooks, path: str) -> Iterator[None]:
    announcements = hooks.workers.job.announcements
    if announcements is None:
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
            return ["", *(_look_at(path) or ())]
        names = tf.io.gfile.listdir(path)
        found = {
            name: seen
            for name in names
            if (seen := _look_at(os.path.join(path, name))) is not None
        }
        newest = max(found, key=lambda name: found[name][1])
        return [newest, *found[newest]]
    return None


# The others' part.


def _wait(hooks: KerasHooks, path: str, own: bool = False) -> bool:
    """Wait until the chief has written the file, or will not write it.

    Returns:
        Whether this rank must write `path`, a file of its `own` that doesn't exist yet:
        the chief has gone on without it, and no callback asks, whose logs may differ.

    Raises:
        Exception: The error of the chief's attempt.
        CollectiveTimeout: Writing takes the chief too long.
        CollectiveError: The job has failed.
    """
    announcements = hooks.workers.job.announcements
    if announcements is None or (hooks.dynamic and current.after_batch):
        return False
    _Process.missing.pop(_key(path), None)
    outcome = announcements.wait(_topic(path))
    if outcome.kind == "failed":
        raise _error(outcome.facts, path)
    if outcome.kind == "busy":
        raise CollectiveTimeout(
            f"The chief has been writing a file for {announcements.seconds:g} s. "
            f"Received: filepath={path!r}. Give it more time with the strategy's "
            "`timeout=`."
        )
    if outcome.kind == "done":
        if _topic(path) != path:
            _copy(str(outcome.facts.get("path")), path)
        _expect(path, outcome.facts)
        return False
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


def _copy(source: str, path: str) -> None:
    """Copy the chief's file in its temporary folder to this rank's own."""
    if os.path.abspath(path) == source:
        return
    # If it can't be read here, `load` reports that.
    with contextlib.suppress(OSError):
        if os.path.isdir(source):
            shutil.copytree(source, path, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, path)


def _expect(given: str, facts: dict[str, Any]) -> None:
    """Check that the chief's file is visible on this host."""
    seen = facts.get("seen")
    if given.startswith(_REMOTE) or not isinstance(seen, list) or len(seen) != 3:
        return
    name, size, written = seen
    path = os.path.join(given, name) if name else given
    until = time.monotonic() + _VISIBLE_SECONDS
    while True:
        found = _look_at(path)
        # The chief, or another process, may have written it again meanwhile.
        if found is not None and (found[1] > written or found == (size, written)):
            return
        # Without a shared file system, once that is known, there is no wait.
        if "invisible" in _Process.warned or time.monotonic() > until:
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


def _note_missing(path: str, why: str) -> None:
    _Process.missing[_key(path)] = why, _look_at(path)


def _warn_once(kind: str, text: str) -> None:
    if kind not in _Process.warned:
        _Process.warned.add(kind)
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


def _topic(path: str) -> str:
    """Return the topic to announce a path by, without parts drawn by `tempfile`."""
    return re.sub(rf"\b{tempfile.gettempprefix()}[a-z0-9_]{{8}}\b", "*", path)


def _key(path: Any) -> str:
    text = str(os.fspath(path))
    return text if "://" in text else os.path.abspath(text)


def _look_at(path: Any) -> tuple[int, int] | None:
    """Return the size in bytes of a file and its time in ns; None if it's missing."""
    try:
        found = tf.io.gfile.stat(str(os.fspath(path)))
    except (OSError, tf.errors.OpError):
        return None
    return int(found.length), int(found.mtime_nsec)
