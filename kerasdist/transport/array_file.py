"""A file of arrays that is there as a whole, or not at all.

It is one of numpy's `.npz` files: facts as a JSON object, and each array as its bytes,
since numpy itself knows no bfloat16. Behind it is a CRC-32 of all that, because a zip
file has bytes that its own checksums don't cover. It is written to another file in the
same folder, synced to the disk, and renamed: a reader finds the old one or the new one.
"""

from __future__ import annotations

import contextlib
import glob
import io
import json
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

_MAGIC = b"PK"
_VERSION = 2
_BLOCK_BYTES = 8 << 20
_SUM = struct.Struct("!I")


class _SummingWriter(io.RawIOBase):
    """Passes on what is written, and computes its CRC-32."""

    def __init__(self, file: BinaryIO) -> None:
        self.crc = 0
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self._file.write(data)


def write_arrays(
    path: Path, facts: Mapping[str, Any], arrays: Sequence[npt.NDArray[Any]]
) -> int:
    """Write a file in the place of the last one; return its number of bytes.

    Args:
        path: The file; its folder is made if it isn't there.
        facts: A JSON object; "version" and "arrays" are added.
        arrays: Arrays of numbers.

    Raises:
        OSError: It can't be written; the last one is unchanged.
    """
    forms = [[array.dtype.name, list(array.shape)] for array in arrays]
    text = json.dumps({**facts, "version": _VERSION, "arrays": forms}).encode()
    members: dict[str, Any] = {
        f"array{number}": np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for number, array in enumerate(arrays)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name can't be guessed, and no existing link or file is followed or written
    # over: other users may write to the folder. Only the owner may read the weights.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o600)
    try:
        with open(descriptor, "wb") as file:
            writer: Any = _SummingWriter(file)
            np.savez(writer, facts=np.frombuffer(text, np.uint8), **members)
            file.write(_SUM.pack(writer.crc))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return size


def read_arrays(
    path: Path, *, facts_only: bool = False
) -> tuple[dict[str, Any], list[npt.NDArray[Any]]]:
    """Return a file's facts and arrays.

    Args:
        path: The file.
        facts_only: Whether to leave out the arrays, and the check of their bytes.

    Raises:
        OSError: It can't be read.
        ValueError: It is damaged, or no such file of this version.
    """
    # It doesn't wait for the writer of a FIFO in its place.
    with open(path, "rb", opener=lambda p, f: os.open(p, f | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it isn't a regular file")
        head = file.read(8)
        if not head.startswith(_MAGIC):
            raise ValueError(f"it begins with {head!r}, not with {_MAGIC!r}")
        file.seek(0)
        if not facts_only:
            _check_sum(file)
        try:
            with np.load(file, allow_pickle=False) as members:
                facts = json.loads(members["facts"].tobytes())
                if facts["version"] != _VERSION:
                    raise ValueError(
                        f"its format is {facts['version']!r}, expected {_VERSION}"
                    )
                forms = [] if facts_only else facts["arrays"]
                arrays = [
                    members[f"array{number}"].view(np.dtype(name)).reshape(shape)
                    for number, (name, shape) in enumerate(forms)
                ]
        except OSError:
            raise
        except Exception as error:
            # What isn't such a file makes zipfile raise nearly anything.
            raise ValueError(str(error) or type(error).__name__) from error
    return facts, arrays


def _check_sum(file: BinaryIO) -> None:
    left, crc = os.fstat(file.fileno()).st_size - _SUM.size, 0
    while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
        crc = zlib.crc32(block, crc)
        left -= len(block)
    if file.read() != _SUM.pack(crc):
        raise ValueError("its checksum is wrong")
    file.seek(0)


def remove_parts(path: Path) -> None:
    """Remove the files that killed writers left."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError):
            part.unlink()
