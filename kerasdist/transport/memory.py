"""Memory that workers of a host share, and sockets that forked children close."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kerasdist.errors import ProtocolError, SharedMemoryFull

# Memory that the workers of one host share.
#
# A segment is a file in memory without a name (`memfd_create`): other workers get it as
# a file descriptor over a Unix socket. The kernel frees it when the last worker that
# maps it has ended, in any way, so nothing can be left behind. It is sealed: no process
# that has it can change its size, which would end all others that read it with SIGBUS.

# As the kernel shows it, in /proc/PID/maps for instance.
SEGMENT_NAME = "kerasdist-segment"
_MEMORY_NAME = "kerasdist"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_segment(size: int) -> int:
    """Return the file descriptor of a new segment of `size` bytes.

    The memory is reserved now: a lack of memory is an error here and not a crash at a
    later write.

    Raises:
        SharedMemoryFull: There's no memory for it; nothing is left.
        OSError: The system forbids it.
    """
    try:
        return _create(SEGMENT_NAME, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise SharedMemoryFull(
            "There is no memory for a buffer that the workers of this host share. "
            f"Received: {size} bytes wanted, but {error.strerror}. Give the machine, "
            "the container (Docker: `--memory`; Kubernetes: resources.limits) or the "
            "process (`ulimit -f`) more, or use `transport='tcp'`, which needs none."
        ) from error


def create_memory(size: int) -> int:
    """Create memory as `create_segment`, but such as is optional.

    Raises:
        OSError: There's not enough memory, or the system forbids it.
    """
    return _create(_MEMORY_NAME, size)


def _create(name: str, size: int) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_segment(descriptor: int, size: int) -> npt.NDArray[np.uint8]:
    """Map a segment; the array keeps the mapping alive without the descriptor.

    Raises:
        ProtocolError: It's shorter than `size` bytes, or its size may change.
    """
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:  # a file of another kind
        sealed = 0
    length = os.fstat(descriptor).st_size
    if not sealed or length < size:
        raise ProtocolError(
            "Shared memory has the wrong size, or isn't sealed. "
            f"Received: {length} bytes, {'' if sealed else 'not '}sealed; expected "
            f"{size}, sealed."
        )
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)


# Sockets that this process's forked children don't keep.
#
# A child that a script forks (a pool of processes that load data, for instance) has
# copies of all descriptors. While it runs, a killed worker's connections would stay
# open, so the others would notice the loss by its silence only, and its port would stay
# in use.


class _Closable(Protocol):
    def close(self) -> None: ...


_OURS: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_children(thing: _Closable) -> None:
    """Make forked children close their copy of a socket or a file after the fork.

    The connection itself isn't shut down.
    """
    _OURS.add(thing)


def _close() -> None:
    for thing in list(_OURS):
        thing.close()
    _OURS.clear()


os.register_at_fork(after_in_child=_close)
