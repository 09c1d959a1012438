"""Segments of shared memory: room is reserved, nothing is left."""

from __future__ import annotations

import fcntl
import os
import resource

import pytest

from kerasdist import errors
from kerasdist.transport.memory import (
    create_memory,
    create_segment,
    map_segment,
)


def test_no_memory_is_an_error_with_numbers_and_remedy():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Files of this process, also those in memory, may have 1 MB.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(
            errors.SharedMemoryFull,
            match=r"^There is no memory for a buffer that the workers of this host sh"
            r"are\. Received: 2097152 bytes wanted, but File too large\. Give the m",
        ):
            create_segment(2 << 20)
        os.close(create_segment(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("create", [create_segment, create_memory])
def test_nobody_who_has_a_segment_can_end_its_readers(create):
    """A peer that made it smaller ended those that read it, with SIGBUS."""
    descriptor = create(8192)
    mapped = map_segment(descriptor, 8192)
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(descriptor)
    assert mapped.sum() == 0


@pytest.mark.parametrize("what", ["short", "open", "file"])
def test_memory_that_could_end_its_reader_is_refused(what, tmp_path):
    """Whoever sends it holds the secret, but may be mistaken."""
    if what == "short":
        descriptor = create_segment(4096)
    elif what == "open":
        descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 8192)
    else:
        descriptor = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
        os.ftruncate(descriptor, 8192)
    sealed = "" if what == "short" else "not "
    with pytest.raises(
        errors.ProtocolError,
        match=r"^Shared memory has the wrong size, or isn't sealed\. "
        rf"Received: \d+ bytes, {sealed}s",
    ):
        map_segment(descriptor, 8192)
    os.close(descriptor)
