"""The result of one task, in the unnamed file that it inherits from the launcher.

    kind    one byte: a value, or an error
    length  8 bytes
    pickle  the value; of an error a dictionary of plain data

Kind and length are written last: a file without them isn't whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import struct
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any

from kerasdist.functions.pickling import dump

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
