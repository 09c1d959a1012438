"""Segments of shared memory: room is reserved, nothing is left."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest

from groups import in_threads, open_sockets, socket_mesh
from kerasdist import errors
from kerasdist.collectives.shared import SharedMemoryCommunicator
from kerasdist.transport.failures import Unsupervised
from kerasdist.transport.segments import create_segment, map_segment


@pytest.fixture
def small_folder(tmp_path):
    """A file system in memory with room for 1 MB."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        reason = f"mounting a small tmpfs needs root: {done.stderr.decode()}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    yield str(tmp_path)
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_segment_is_shared_by_all_who_map_it_and_has_no_name():
    names = os.listdir("/dev/shm")
    descriptor = create_segment(8192)
    first, second = map_segment(descriptor, 8192), map_segment(descriptor, 8192)
    os.close(descriptor)
    first[5000] = 77
    assert second[5000] == 77
    assert second[0] == 0
    assert os.listdir("/dev/shm") == names


def test_a_full_folder_is_an_error_with_numbers_and_remedy(small_folder):
    before = open_sockets()
    with pytest.raises(
        errors.SharedMemoryFull,
        match=rf"^{small_folder} has no room for a buffer\. Received: 2097152 bytes "
        r"wanted, 1048576 of 1048576 bytes free\. Make it larger \(Docker: `--shm-size",
    ):
        create_segment(2 << 20, small_folder)
    assert open_sockets() == before
    os.close(create_segment(1 << 20, small_folder))


def test_a_folder_that_is_not_there_is_an_error():
    with pytest.raises(FileNotFoundError):
        create_segment(4096, "/dev/shm/not-there")


def test_a_segment_that_is_too_short_is_an_error():
    descriptor = create_segment(4096)
    with pytest.raises(ValueError, match=r"^mmap length is greater than file size$"):
        map_segment(descriptor, 8192)
    os.close(descriptor)


@pytest.mark.parametrize("victims", [[2], [0, 1, 2]])
def test_all_ranks_say_whose_folder_is_full_and_close_what_they_got(
    small_folder, victims
):
    before = open_sockets()
    shared = Unsupervised()
    shared.step = 9
    group = [
        SharedMemoryCommunicator(
            transport,
            shared,
            10.0,
            small_folder if transport.rank in victims else "/dev/shm",
        )
        for transport in socket_mesh(3)
    ]

    def work(rank):
        group[rank].all_reduce([np.ones(3)])  # has room
        with pytest.raises(errors.SharedMemoryFull) as caught:
            group[rank].all_reduce([np.ones(1 << 18)])
        group[rank].close()
        return str(caught.value)

    (text,) = set(in_threads(3, work))
    assert text.startswith(tuple(f"rank {v} (mesh:{v}) in #2 all_red" for v in victims))
    assert f" at step 9: {small_folder} has no room for a buffer. Received: " in text
    assert open_sockets() == before


def test_segments_and_descriptors_are_given_back_at_close():
    before = open_sockets()
    group = [
        SharedMemoryCommunicator(transport, Unsupervised(), 10.0)
        for transport in socket_mesh(4)
    ]
    for elements in (10, 100_000, 300_000):
        in_threads(4, lambda r, n=elements: group[r].all_reduce([np.ones(n)]))
        # Besides the sockets, one descriptor for each of 4 segments on 4 ranks.
        assert open_sockets() == before + 4 * 3 + 16
    in_threads(4, lambda r: group[r].close())
    assert open_sockets() == before
