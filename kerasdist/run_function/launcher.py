"""The launcher's process, `kerasdist run`, and what it shows and reports.

It is a new interpreter in a session of its own: neither Ctrl-C in a terminal nor the
interrupt of a notebook reaches it, but from here. When this process ends, the launcher
ends the job: see `kerasdist.cli.run.job_spec`.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, TextIO

import cloudpickle

from kerasdist.transport.liveness.launcher_pipe import descriptor_in_words

# The pickling of functions and results: cloudpickle, with two exceptions.
#
# cloudpickle takes functions and classes of `__main__`, of a notebook's cells, lambdas
# and closures by value, those of other modules by name. Here code keeps the file's
# name, and `History` is pickled without its model.


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        # It holds the model, with its strategy. Most who return it want the numbers.
        keras = sys.modules.get("keras")
        if keras is not None and type(obj) is keras.callbacks.History:
            return make_history, (obj.history, obj.epoch, obj.params)
        if isinstance(obj, types.CodeType):
            # cloudpickle leaves the name of the file out since version 3.1.3. Without
            # it tracebacks have no lines, and `tf.function` can't convert the code.
            make, args = self.dispatch_table[types.CodeType](obj)
            return make_code, (make, args, obj.co_filename)
        return super().reducer_override(obj)


def dump(value: Any, file: IO[bytes]) -> None:
    """Pickle a value into a file.

    Raises:
        Exception: It can't be pickled; classes raise what they like.
    """
    _Pickler(file).dump(value)


def make_code(
    make: Callable[..., types.CodeType], args: tuple[Any, ...], filename: str
) -> types.CodeType:
    """Return a code object with the name of its file."""
    return make(*args).replace(co_filename=filename)


def make_history(
    history: dict[str, list[Any]], epoch: list[int], params: dict[str, Any] | None
) -> Any:
    """Return a `keras.callbacks.History` without a model."""
    made = importlib.import_module("keras").callbacks.History()
    made.set_params(params)
    made.history = history
    made.epoch = epoch
    return made


_HEAD = struct.Struct(">cQ")
_VALUE, _ERROR = b"V", b"E"
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


# The result of one task, in the unnamed file that it inherits from the launcher.
#
#     kind    one byte: a value, or an error
#     length  8 bytes
#     pickle  the value; of an error a dictionary of plain data
#
# Kind and length are written last: a file without them isn't whole.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteError:
    """The error of a task.

    Attributes:
        stage: Where it was raised: `"load"` of the function, its `"call"`, or the
            pickling of its `"result"`.
        message: Its class and message.
        traceback: Its traceback, as Python prints it.
        result: Of the stage `"result"` the type of the result.
        pickled: The exception; None if it can't be pickled.
    """

    stage: str
    message: str
    traceback: str
    result: str
    pickled: bytes | None

    def exception(self) -> BaseException | None:
        """Return the exception; None if it can't be made here."""
        if self.pickled is not None:
            with contextlib.suppress(Exception):  # constructors raise what they like
                found = pickle.loads(self.pickled)
                return found if isinstance(found, BaseException) else None
        return None


def write_value(descriptor: int, value: Any) -> None:
    """Write the value that the function has returned.

    Raises:
        Exception: It can't be pickled, or written; classes raise what they like.
    """
    with _written(descriptor, _VALUE) as file:
        dump(value, file)


def write_error(
    descriptor: int, stage: str, error: BaseException, result: str = ""
) -> None:
    """Write an error.

    Args:
        descriptor: Of the result's file.
        stage: See `RemoteError`.
        error: The error.
        result: See `RemoteError`.

    Raises:
        OSError: It can't be written.
    """
    frames = frames_of_user(error.__traceback__)
    text = traceback.format_exception(type(error), error, frames)
    pickled: bytes | None = None
    with contextlib.suppress(Exception):  # classes raise what they like
        buffer = io.BytesIO()
        dump(error, buffer)
        pickled = buffer.getvalue()
    found = RemoteError(
        stage=stage,
        message="".join(traceback.format_exception_only(type(error), error)).strip(),
        traceback="".join(text).rstrip(),
        result=result,
        pickled=pickled,
    )
    with _written(descriptor, _ERROR) as file:
        pickle.dump(dataclasses.asdict(found), file)


def frames_of_user(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame on that isn't of this package."""
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        if not (name.startswith(_HERE) or name == "<frozen runpy>"):
            return frames
        frames = frames.tb_next
    return None


@contextlib.contextmanager
def _written(descriptor: int, kind: bytes) -> Iterator[IO[bytes]]:
    """Yield a file whose content is the pickle; at the block's end it is whole."""
    os.ftruncate(descriptor, 0)
    file = os.fdopen(os.dup(descriptor), "wb")
    try:
        file.seek(_HEAD.size)
        yield file
        file.flush()
        length = file.tell() - _HEAD.size
    except BaseException:
        # On a full disk this makes room for the error.
        os.ftruncate(descriptor, 0)
        raise
    finally:
        with contextlib.suppress(OSError):
            file.close()
    os.pwrite(descriptor, _HEAD.pack(kind, length), 0)


def read_result(file: IO[bytes]) -> tuple[Any] | RemoteError | None:
    """Return the value in a tuple, or the error; None if the file isn't whole.

    Raises:
        Exception: The value can't be unpickled; classes raise what they like.
    """
    if _kind(file) == _VALUE:
        return (pickle.load(file),)
    return read_error(file)


def read_error(file: IO[bytes]) -> RemoteError | None:
    """Return the error; None if there is a value, or the file isn't whole."""
    return RemoteError(**pickle.load(file)) if _kind(file) == _ERROR else None


def _kind(file: IO[bytes]) -> bytes | None:
    """Return the kind of a whole file, and go to its pickle."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    kind, length = _HEAD.unpack(head)
    return bytes(kind) if size == _HEAD.size + length else None


# The variables that name inherited descriptors: of the call, the results, the outcome.
#
#     1. caller     gives the launcher the file with the call, and a socket
#     2. launcher   gives each task that file, and an unnamed one for its result
#     3. launcher   sends through the socket how each task ended, and its result's file
#
# Nothing has a name that another process could open; to other hosts both files are sent
# through ssh.

CALL_VARIABLE = "KERASDIST_CALL_FD"
RESULT_VARIABLE = "KERASDIST_RESULT_FD"
OUTCOME_VARIABLE = "KERASDIST_OUTCOME_FD"


_MOST = 65536
# Seconds for the rest of the output after the launcher has ended, and for the end of a
# launcher that was told to end: its own limits add up to less.
_OUTPUT = 10.0
_END = 20.0
# The first Ctrl-C interrupts the functions, the second ends them at once.
_KILL_AT = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """The end of one task.

    Attributes:
        kind: "worker" or "ps", as `TF_CONFIG` has it.
        index: Index among those; of a worker its rank.
        code: Its exit code, negative for a signal.
        ended: How it ended, in words.
        first: Whether it caused the job's failure.
        file: The file with its result.
    """

    kind: str
    index: int
    code: int | None
    ended: str
    first: bool
    file: IO[bytes]


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """The end of a job.

    Attributes:
        code: The launcher's exit code, negative for a signal.
        faults: Why nothing was started.
        tasks: The end of each task.
    """

    code: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)
    tasks: list[TaskEnd] = dataclasses.field(default_factory=list)

    def take(self, message: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Take a message of the launcher."""
        self.faults += message.get("faults", [])
        if descriptors:
            file = os.fdopen(descriptors[0], "rb")
            self.tasks.append(TaskEnd(**message, file=file))

    def close(self) -> None:
        """Close the files of the results."""
        for task in self.tasks:
            task.file.close()


def launch(
    options: Sequence[str], environ: Mapping[str, str], call: int, outcome: Outcome
) -> None:
    """Run the launcher to its end, and show what the chief writes.

    Args:
        options: What follows `kerasdist run`.
        environ: The environment of the launcher and the workers.
        call: Descriptor of the file with the call.
        outcome: Takes what the launcher reports.

    Raises:
        OSError: It can't be started.
        KeyboardInterrupt: Ctrl-C; the job has ended.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, _interrupts() as interrupt, contextlib.ExitStack() as undo:
        descriptors = (call, theirs.fileno())
        streams = (sys.stdout, sys.stderr)
        process = subprocess.Popen(
            [
                # Nothing of the working folder is imported.
                *(sys.executable, "-P", "-m", "kerasdist", "run"),
                *options,
            ],
            stdin=subprocess.DEVNULL,
            stdout=_target(sys.stdout, sys.__stdout__, 1),
            stderr=_target(sys.stderr, sys.__stderr__, 2),
            bufsize=0,
            env={
                **_importing(environ),
                CALL_VARIABLE: descriptor_in_words(call),
                OUTCOME_VARIABLE: descriptor_in_words(theirs.fileno()),
            },
            pass_fds=descriptors,
            start_new_session=True,
        )
        undo.enter_context(_ended(process))
        interrupt(process)
        theirs.close()
        _follow(process, streams, ours, outcome)
        outcome.code = process.wait(_END)


def _importing(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python finds this package."""
    found = dict(environ)
    home = Path(__file__).resolve().parents[2]
    if home.name not in ("site-packages", "dist-packages"):
        paths = [str(home), *filter(None, [environ.get("PYTHONPATH")])]
        found["PYTHONPATH"] = os.pathsep.join(paths)
    return found


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End a process with the block, if it still runs, and close its pipes."""
    try:
        yield
    finally:
        for number, seconds in ((signal.SIGHUP, _END), (signal.SIGKILL, None)):
            if process.poll() is None:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Pass SIGINT on to a process; after the block it has its usual effect here.

    Yields:
        Takes the process, which gets those that have arrived before it, too.
    """
    received: list[tuple[int, FrameType | None]] = []
    processes: list[subprocess.Popen[bytes]] = []

    def pass_on() -> None:
        kill = len(received) >= _KILL_AT
        for process in processes if received else ():
            process.send_signal(signal.SIGKILL if kill else signal.SIGINT)

    def take(number: int, frame: FrameType | None) -> None:
        received.append((number, frame))
        pass_on()

    def to(process: subprocess.Popen[bytes]) -> None:
        processes.append(process)
        pass_on()

    before = signal.getsignal(signal.SIGINT)
    # Other threads aren't interrupted, and can't have handlers.
    if threading.current_thread() is not threading.main_thread() or not callable(
        before
    ):
        yield to
        return
    signal.signal(signal.SIGINT, take)
    try:
        yield to
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        # It raises KeyboardInterrupt, unless the user has another handler.
        before(*received[0])


# The launcher's output, written to `sys.stdout` and `sys.stderr`. In a script the
# launcher writes by itself to the same terminal or file. In a notebook, where output
# belongs to a cell, it writes to a pipe.


def _target(stream: TextIO | None, original: TextIO | None, descriptor: int) -> Any:
    """Return what `Popen` needs for a stream.

    Args:
        stream: Where it is to be written.
        original: What the stream was when the interpreter started.
        descriptor: The stream's descriptor then.
    """
    if stream is None:
        return subprocess.DEVNULL
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
        if stream is original and stream.fileno() == descriptor:
            return None
    return subprocess.PIPE


def _follow(
    process: subprocess.Popen[bytes],
    streams: Sequence[TextIO],
    sock: socket.socket,
    outcome: Outcome,
) -> None:
    """Copy output and take messages until the launcher has ended."""
    until: float | None = None
    with selectors.DefaultSelector() as selector:
        read = functools.partial(_receive, sock, outcome)
        selector.register(sock, selectors.EVENT_READ, read)
        for pipe, stream in zip((process.stdout, process.stderr), streams, strict=True):
            if pipe is not None:
                decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
                read = functools.partial(_copy, pipe.fileno(), stream, decoder)
                selector.register(pipe, selectors.EVENT_READ, read)
        while selector.get_map():
            for key, _ in selector.select(0.5):
                if not key.data():
                    selector.unregister(key.fileobj)
            if process.poll() is not None:
                # A process that has escaped may hold a pipe.
                until = until or time.monotonic() + _OUTPUT
                if time.monotonic() > until:
                    return


def _receive(sock: socket.socket, outcome: Outcome) -> bool:
    """Take a message; return whether there was one."""
    data, descriptors, _, _ = socket.recv_fds(sock, _MOST, 1)
    if data:
        outcome.take(json.loads(data), descriptors)
    return bool(data)


def _copy(descriptor: int, stream: TextIO, decoder: codecs.IncrementalDecoder) -> bool:
    """Write what a pipe has to a stream; return whether there was anything."""
    data = os.read(descriptor, _MOST)
    text = decoder.decode(data, final=not data)
    if text:
        stream.write(text)
        stream.flush()
    return bool(data)
