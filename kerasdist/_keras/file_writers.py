"""Hooks of functions that read and write files on several workers.

The chief writes, and the others wait for that, see below. Code that only the chief runs
is run outside of the strategy's scope: creating a variable in the scope is a
collective, which the others wouldn't join.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.utils import file_utils

from kerasdist._keras.chief_failover import flush_board, take_over
from kerasdist._keras.context import current, setting
from kerasdist._keras.learning_rate import steps_with_others
from kerasdist._keras.protocols import (
    KerasHooks,
    current_hooks,
    dynamic_hooks,
    hooks_of,
)
from kerasdist._keras.unscoped_models import writer_hooks
from kerasdist._tf.patching import Original
from kerasdist._tf.variables import OWN_FILES, is_distributed, outside_of_scopes
from kerasdist.errors import CollectiveTimeout

# Files on several workers: the chief writes them, and the others wait for that.
#
#     chief      model.save(p) ─ begins ── writes ── has written ─ load_model(p) ─ ...
#                                   │                     │
#     others     model.save(p) ─ wait ................... return ─ load_model(p) ─ ...
#
# The chief waits for no other rank, so that it may also be the only one that saves. The
# others are informed outside of collectives, see `transport.liveness.announcements`; if
# the chief doesn't write at this point of the script they continue, with a warning.

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
    if isinstance(kind, type) and issubclass(kind, Exception):
        if issubclass(kind, OSError) and isinstance(facts.get("errno"), int):
            return kind(facts["errno"], f"{facts.get('strerror')} {where}")
        with contextlib.suppress(TypeError):  # its constructor needs more arguments
            return kind(f"{text} {where}")
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


# The progress of training that is stored with a `BackupAndRestore` backup.
#
# Keras writes the epoch and the batch beside the weights, in JSON. For asynchronous
# workers that isn't enough: the weights contain steps of all workers, and the optimizer
# counts only the chief's. So the number of all steps is written with it:
#
#     {"epoch": 1, "batch": 2, "kerasdist": {"steps": 9, "steps_of_epoch": 3}}
#
# A job that resumes from such a backup, in any strategy, writes it, too.

_KEY = "kerasdist"


@dataclass(frozen=True, kw_only=True)
class Backup:
    """The progress of training at the point from which it is resumed.

    Attributes:
        restored: Whether training is resumed at all.
        steps: How many steps of all workers are in the weights; None: as many as the
            optimizer has counted.
        batches: How many batches of the interrupted epoch are in the weights. Keras
            starts that epoch again.
    """

    restored: bool = False
    steps: int | None = None
    batches: int = 0


def write_backup(original: Original, self: Any) -> None:
    """Replace `BackupAndRestore._save_model`, on the chief: add training's progress."""
    original(self)
    progress = _progress(self)
    if progress is None:
        return
    path = str(self._training_metadata_path)
    with file_utils.File(path, "r") as file:
        facts = json.loads(file.read())
    facts[_KEY] = {"steps": progress[0], "steps_of_epoch": progress[1]}
    # Written atomically: after a kill Keras's own file is still there.
    with file_utils.File(f"{path}.new", "w") as file:
        file.write(json.dumps(facts))
    tf.io.gfile.rename(f"{path}.new", path, overwrite=True)


def read_backup(callbacks: Sequence[Any]) -> Backup:
    """Return the progress that the callbacks of a `fit` have restored, if any."""
    for callback in callbacks:
        path = getattr(callback, "_training_metadata_path", None)
        if not isinstance(callback, keras.callbacks.BackupAndRestore) or not path:
            continue
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
            file_utils.File(path, "r") as file,
        ):
            facts = json.loads(file.read())
            # At the end of an epoch Keras writes 0, as after the first batch.
            inside = callback.save_freq != "epoch"
            if _KEY not in facts:
                batches = int(facts["batch"]) + 1 if inside else 0
                return Backup(restored=True, batches=batches)
            mine = facts[_KEY]
            of_epoch = int(mine["steps_of_epoch"]) if inside else 0
            return Backup(restored=True, steps=int(mine["steps"]), batches=of_epoch)
    return Backup()


def _progress(callback: Any) -> tuple[int, int] | None:
    """Return the numbers of steps, in all and in this epoch, in a model's weights.

    None if the optimizer has counted all of them itself.
    """
    dynamic = dynamic_hooks(callback.model.distribute_strategy)
    if dynamic is not None:
        return dynamic.weights.progress()
    steps = steps_with_others(callback.model)
    if steps is None:
        return None
    inside = callback.save_freq != "epoch"
    return steps, int(callback._last_batch_seen) + 1 if inside else 0


def on_chief_only(original: Original, callback: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a callback's method that writes: only the chief does it."""
    # `set_model` is called before the callback has one.
    model = callback.model if callback.model is not None else (args or [None])[0]
    hooks = writer_hooks(model) if model is not None else None
    if hooks is not None and not _is_chief(hooks) and not OWN_FILES.get(callback):
        if current.succession is not None:
            with _leaving(hooks):
                current.succession.keep(original, callback, args, kwargs)
        if args and args[0] is model:
            callback._model = model
        return None
    with _leaving(hooks):
        take_over()
        result = original(callback, *args, **kwargs)
        if current.succession is not None and original.__name__ == "on_epoch_end":
            flush_board(callback)
        return result


def note_own_files(hooks: KerasHooks, callbacks: Sequence[Any]) -> None:
    """Note the callbacks that write to temporary folders which each rank has made.

    All workers call it alike, with the same callbacks.
    """
    for callback in callbacks:
        path = str(getattr(callback, "filepath", None) or "")
        if is_temporary(path):
            paths = hooks.consensus.facts(os.path.abspath(path))
            OWN_FILES.set(callback, len(set(paths.values())) > 1)


def _is_chief(hooks: KerasHooks) -> bool:
    """Return whether this worker writes the job's files; one that joins doesn't."""
    joining = hooks.elastic is not None and hooks.elastic.joining
    return hooks.workers.rank == 0 and not joining


def save_state(original: Original, callback: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a callback's saving: the chief writes, with metrics of all workers.

    Each worker's variables hold its part of them: all workers take part in their sum.
    """
    hooks = writer_hooks(callback.model)
    if hooks is not None and hooks.workers.rank > 0:
        for variable in callback.model.metrics_variables:
            variable.numpy()
        return None
    return on_chief_only(original, callback, *args, **kwargs)


def write(original: Original, saved: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace what saves a model or an archive: the chief writes, the others wait."""
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
    if hooks.workers.rank > 0 and not wait_for_chief(
        hooks, path, own=state_of_file(path) is None
    ):
        return None
    with setting(writing=True), _leaving(hooks), announcing(hooks, path):
        return original(saved, *args, **kwargs)


def write_checkpoint(
    original: Original, saved: Any, file_prefix: str, options: Any = None
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
    follows = True
    with contextlib.ExitStack() as block:
        block.enter_context(setting(writing=True))
        block.enter_context(_leaving(hooks))
        if hooks.workers.rank == 0:
            with announcing(hooks, folder):
                return str(original(saved, file_prefix, options))
        summed = any(
            v.synchronization == tf.VariableSynchronization.ON_READ for v in variables
        )
        written = None
        if summed:
            # Reading metrics sums them over all workers, so all must take part.
            unused = block.enter_context(tempfile.TemporaryDirectory())
            written = os.path.join(unused, "checkpoint")
            original(saved, written, options)
        # Metrics can't be read again, because the chief has gone on.
        own = not summed and state_of_file(f"{file_prefix}.index") is None
        if wait_for_chief(hooks, folder, own=own):
            with announcing(hooks, folder):
                if written is None:
                    return str(original(saved, file_prefix, options))
                # The chief was lost.
                _copy_checkpoint(written, file_prefix)
            follows = False
    # Keep a checkpoint manager's list of checkpoints.
    with setting(following=follows):
        for call in getattr(options, "experimental_write_callbacks", None) or ():
            call(*[file_prefix][: len(inspect.signature(call).parameters)])
    return file_prefix


def _copy_checkpoint(source: str, file_prefix: str) -> None:
    tf.io.gfile.makedirs(os.path.dirname(file_prefix) or ".")
    for path in sorted(tf.io.gfile.glob(f"{source}.*")):
        target = f"{file_prefix}{path.removeprefix(source)}"
        tf.io.gfile.copy(path, target, overwrite=True)


def write_checkpoint_state(original: Original, *args: Any, **kwargs: Any) -> None:
    """Replace the naming of a folder's latest checkpoint: only the chief does it."""
    if not current.following:
        original(*args, **kwargs)


def _distributed_in(saved: Any) -> list[Any]:
    """Return the distributed variables in a checkpoint, Keras's among them."""
    found = tf.train.TrackableView(saved).descendants()
    variables = [getattr(one, "_value", one) for one in found]
    return [variable for variable in variables if is_distributed(variable)]


def finish_background(
    original: Original, callback: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace the wait for writing in the background: the others wait for the chief."""
    model = callback.model
    hooks = None if model is None else writer_hooks(model)
    if hooks is None:
        return original(callback, *args, **kwargs)
    path = str(callback.directory)
    if hooks.workers.rank == 0:
        with announcing(hooks, path):
            return original(callback, *args, **kwargs)
    original(callback, *args, **kwargs)
    wait_for_chief(hooks, path)
    return None


def outside(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Replace what one rank alone may call: run it outside of the scope."""
    with _leaving(current_hooks()):
        return original(*args, **kwargs)


def load(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Replace what loads a file: explain why one that was saved is missing.

    Raises:
        ValueError: This rank has saved it, and can't see the file that the chief has
            written; or the chief has written none.
    """
    if _FilesOfProcess.missing:
        path = inspect.signature(original).bind(*args, **kwargs).arguments["filepath"]
        if isinstance(path, (str, os.PathLike)) and (why := why_missing(path)):
            raise ValueError(why)
    return original(*args, **kwargs)


def _leaving(hooks: KerasHooks | None) -> contextlib.AbstractContextManager[None]:
    """Leave the scope of a strategy of kerasdist, in the block."""
    return contextlib.nullcontext() if hooks is None else outside_of_scopes()
