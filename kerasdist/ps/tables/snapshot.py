"""Snapshots of a server's tables on disk.

    offset   bytes   field
    0        8       b"KDSTSNAP"
    8        4       version of this format
    12       8       H, the length of the header
    20       H       the header, a JSON object; under "arrays" dtypes and shapes
    20 + H   ...     the arrays one after the other, nothing in between
    end - 4  4       CRC-32 of everything before

All integers are big-endian. A snapshot is written to another file in the same folder,
synced to the disk, and then renamed: a reader finds the old one or the new one.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import secrets
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kerasdist.collectives.row_exchange import Array, octets
from kerasdist.errors import ProtocolError, SnapshotError
from kerasdist.ps.channel.channel import read_specs

_MAGIC = b"KDSTSNAP"
_VERSION = 1
_HEAD = struct.Struct("!8sIQ")
_MOST_HEADER_BYTES = 1 << 28
_BLOCK_BYTES = 8 << 20


def path_of(folder: str, server: int) -> Path:
    """Return the path of the snapshot of server number `server`."""
    return Path(folder) / f"server-{server}.snapshot"


def write_snapshot(
    path: Path, header: Mapping[str, Any], arrays: Sequence[Array]
) -> int:
    """Write a snapshot in the place of the last one; return its number of bytes.

    Args:
        path: The file; its folder is made if it isn't there.
        header: A JSON object.
        arrays: Arrays of numbers, C-contiguous.

    Raises:
        SnapshotError: It can't be written; the last one is unchanged.
    """
    specs = [[str(array.dtype.name), list(array.shape)] for array in arrays]
    text = json.dumps({**header, "arrays": specs}).encode()
    # The name can't be guessed, and no existing link or file is followed or written
    # over: other users may write to the folder. Only the owner may read the weights.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, flags, 0o600)
        try:
            with open(descriptor, "wb") as file:
                crc = 0
                for part in (_HEAD.pack(_MAGIC, _VERSION, len(text)), text):
                    crc = zlib.crc32(part, crc)
                    file.write(part)
                for array in arrays:
                    crc = _write_array(file, array, crc)
                file.write(struct.pack("!I", crc))
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise SnapshotError(
            f"A snapshot can't be written to {path}: {error.strerror or error}. Is "
            "there room, and may this process write there?"
        ) from error
    return size


def _write_array(file: BinaryIO, array: Array, crc: int) -> int:
    if not array.size:
        return crc
    view = octets(array)
    for start in range(0, len(view), _BLOCK_BYTES):
        block = view[start : start + _BLOCK_BYTES]
        crc = zlib.crc32(block, crc)
        file.write(block)
    return crc


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_snapshot(path: Path) -> tuple[dict[str, Any], list[Array]] | None:
    """Return a snapshot's header and arrays; None if there is none.

    Raises:
        SnapshotError: It is damaged, or no snapshot of this version.
    """
    try:
        with path.open("rb") as file:
            return _read(path, file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SnapshotError(
            f"The snapshot {path} can't be read: {error.strerror or error}."
        ) from error


def _read(path: Path, file: BinaryIO) -> tuple[dict[str, Any], list[Array]]:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise _unusable(path, f"it begins with {head[:8]!r}, not with {_MAGIC!r}")
    _, version, length = _HEAD.unpack(head)
    if version != _VERSION:
        raise _unusable(path, f"its format is {version}, expected {_VERSION}")
    left = os.fstat(file.fileno()).st_size - _HEAD.size - length - 4
    if length > _MOST_HEADER_BYTES or left < 0:
        raise _unusable(path, "it is shorter than its header states")
    text = file.read(length)
    crc = zlib.crc32(text, zlib.crc32(head))
    try:
        header = json.loads(text)
        specs = read_specs(header.pop("arrays"))
    except (ValueError, KeyError, AttributeError, TypeError, ProtocolError) as error:
        raise _unusable(path, f"its header is damaged ({error})") from None
    dtypes = [np.dtype(name) for name, _ in specs]
    sizes = [
        dtype.itemsize * math.prod(shape)
        for dtype, (_, shape) in zip(dtypes, specs, strict=True)
    ]
    if sum(sizes) != left:
        raise _unusable(path, f"it has {left} bytes of numbers, expected {sum(sizes)}")
    arrays: list[Array] = []
    for dtype, (_, shape) in zip(dtypes, specs, strict=True):
        array = np.empty(shape, dtype)
        if array.size:
            view = octets(array)
            if file.readinto(view) != len(view):  # type: ignore[attr-defined]
                raise _unusable(path, "it is shorter than its header states")
            crc = zlib.crc32(view, crc)
        arrays.append(array)
    if file.read(4) != struct.pack("!I", crc):
        raise _unusable(path, "its checksum is wrong")
    return header, arrays


def remove_leftovers(path: Path) -> None:
    """Remove the files that killed writers left; the caller holds the lock."""
    for file in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError):
            file.unlink()


def remove_snapshot(path: Path) -> None:
    """Remove a snapshot that isn't needed any more, if there is one.

    Raises:
        SnapshotError: It can't be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise SnapshotError(
            f"The snapshot {path} can't be removed: {error.strerror or error}."
        ) from error


def _unusable(path: Path, why: str) -> SnapshotError:
    return SnapshotError(
        f"The snapshot {path} can't be used: {why}. Remove it to start from scratch, "
        "or give another `snapshot_dir`."
    )
