"""The result of one task, in the unnamed file that it inherits from the launcher.

    kind    one byte: a value, or an error
    length  8 bytes
    pickle  the value; of an error a dictionary of plain data

Kind and length are written last: a file without them isn't whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import pickle
import struct
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO, Any

import cloudpickle

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
        if self.pickled is None:
            return None
        try:
            found = pickle.loads(self.pickled)
        except Exception:  # constructors raise what they like
            return None
        return found if isinstance(found, BaseException) else None


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
    pickled: bytes | None
    try:
        buffer = io.BytesIO()
        dump(error, buffer)
        pickled = buffer.getvalue()
    except Exception:  # classes raise what they like
        pickled = None
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
