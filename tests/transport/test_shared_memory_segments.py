"""Segments of shared memory: room is reserved, nothing is left."""

from __future__ import annotations

import fcntl
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from groups import in_threads, open_sockets, socket_mesh
from kerasdist import errors
from kerasdist.collectives.shared_memory import SharedMemoryCommunicator
from kerasdist.transport.liveness.failure_protocol import NullFailureDetector
from kerasdist.transport.memory import (
    SEGMENT_NAME,
    create_memory,
    create_segment,
    map_segment,
)


@pytest.fixture
def little_memory():
    """Files of this process, also those in memory, may have 1 MB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_segment_is_shared_by_all_who_map_it_and_has_no_name():
    names = os.listdir("/dev/shm")
    descriptor = create_segment(8192)
    first, second = map_segment(descriptor, 8192), map_segment(descriptor, 8192)
    os.close(descriptor)
    first[5000] = 77
    assert second[5000] == 77
    assert second[0] == 0
    assert os.listdir("/dev/shm") == names


def test_no_memory_is_an_error_with_numbers_and_remedy(little_memory):
    before = open_sockets()
    with pytest.raises(
        errors.SharedMemoryFull,
        match=r"^There is no memory for a buffer that the workers of this host share\. "
        r"Received: 2097152 bytes wanted, but File too large\. Give the machine, the c",
    ):
        create_segment(2 << 20)
    os.close(create_segment(1 << 20))
    group = [
        SharedMemoryCommunicator(transport, NullFailureDetector(), 60.0)
        for transport in socket_mesh(3)
    ]

    def work(rank):
        group[rank].all_reduce([np.ones(3)])  # has room
        with pytest.raises(
            errors.SharedMemoryFull, match=r"^rank \d \(mesh:\d\) in #2 "
        ):
            group[rank].all_reduce([np.ones(1 << 18)])
        group[rank].close()

    in_threads(3, work)
    # Those that some could make are closed, too.
    assert open_sockets() == before


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
    group = [
        SharedMemoryCommunicator(transport, NullFailureDetector(), 20.0)
        for transport in socket_mesh(2)
    ]
    sizes = []

    def create(size):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if SEGMENT_NAME in line:
                begin, end = (int(x, 16) for x in line.split()[0].split("-"))
                assert end - begin == size, "an older segment is still there"
        sizes.append(size)
        return create_segment(size)

    monkeypatch.setattr("kerasdist.collectives.shared_memory.create_segment", create)

    def work(rank):
        for kilobytes in (10, 200, 700, 20_000, 30_000):
            group[rank].all_reduce([np.zeros(kilobytes << 10, np.uint8)])
        group[rank].close()

    in_threads(2, work)
    assert len(set(sizes)) > 2


def test_segments_and_descriptors_are_given_back_at_close():
    before = open_sockets()
    group = [
        SharedMemoryCommunicator(transport, NullFailureDetector(), 60.0)
        for transport in socket_mesh(4)
    ]
    for elements in (10, 100_000, 300_000):
        in_threads(4, lambda r, n=elements: group[r].all_reduce([np.ones(n)]))
        # Besides the sockets, one descriptor for each of 4 segments on 4 ranks.
        assert open_sockets() == before + 4 * 3 + 16
    in_threads(4, lambda r: group[r].close())
    assert open_sockets() == before
