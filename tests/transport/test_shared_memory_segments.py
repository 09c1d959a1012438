import fcntl
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from groups import Group
from kerasdist import errors
from kerasdist.collectives import shared_memory
from kerasdist.transport.memory import (
    SEGMENT_NAME,
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


def test_growing_buffers_use_the_room_of_the_old_ones(monkeypatch):
    """Old and new segments together might not fit."""
    sizes = []

    def create(size):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if SEGMENT_NAME in line:
                begin, end = (int(x, 16) for x in line.split()[0].split("-"))
                assert end - begin == size, "an older segment is still there"
        sizes.append(size)
        return create_segment(size)

    monkeypatch.setattr(shared_memory, "create_segment", create)
    with Group("shared", 2) as group:
        for kilobytes in (10, 700, 20_000):
            zeros = np.zeros(kilobytes << 10, np.uint8)
            group.run(lambda c, zeros=zeros: c.all_reduce([zeros]))
    assert len(set(sizes)) > 1
