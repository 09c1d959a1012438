"""Memory that the workers of one host share.

A segment is a file in /dev/shm without a name (`O_TMPFILE`): other workers get
it as a file descriptor over a Unix socket. The kernel frees it when the last
worker that maps it has ended, however it ended, so nothing can be left behind.
"""

from __future__ import annotations

import errno
import mmap
import os

import numpy as np
import numpy.typing as npt

from kerasdist.errors import SharedMemoryFull

__all__ = ["SHM_FOLDER", "create_memory", "create_segment", "map_segment"]

SHM_FOLDER = "/dev/shm"


def create_segment(size: int, folder: str = SHM_FOLDER) -> int:
    """Return the file descriptor of a new segment of `size` bytes.

    The room is reserved now: a full /dev/shm is an error here and not a crash
    (SIGBUS) at some later write.

    Raises:
        SharedMemoryFull: There's no room; nothing is left.
        OSError: The folder isn't there or can't be written.
    """
    descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        room = os.statvfs(folder)
        raise SharedMemoryFull(
            f"{folder} has no room for a buffer. Received: {size} bytes wanted, "
            f"{room.f_bavail * room.f_frsize} of {room.f_blocks * room.f_frsize} bytes "
            "free. Make it larger (Docker: `--shm-size=2g`; Kubernetes: an emptyDir of "
            "medium Memory at /dev/shm), or use `transport='tcp'`, which needs none."
        ) from error
    return descriptor


def create_memory(size: int) -> int:
    """Return the file descriptor of new memory of `size` bytes, of no file system.

    Like a segment, but it takes no room in /dev/shm.

    Raises:
        OSError: There's not enough memory, or the system forbids it.
    """
    descriptor = os.memfd_create("kerasdist", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_segment(descriptor: int, size: int) -> npt.NDArray[np.uint8]:
    """Map a segment; the array keeps the mapping alive, the descriptor needn't.

    Raises:
        ValueError: The segment is shorter than `size` bytes.
    """
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
