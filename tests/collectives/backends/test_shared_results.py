"""Lent results: one memory that all workers of a host read."""

import os

import numpy as np
import pytest

from groups import Group
from kerasdist.collectives import shared_memory

LARGE = 300_001  # elements: more than one block, in chunks of different sizes


def address(array):
    return array.__array_interface__["data"][0]


def own(rank, size=LARGE):
    return np.random.default_rng(rank).random(size, np.float32)


def memories(communicator):
    """Those that this rank has mapped, whether in use or not: no result shows them."""
    return communicator.lent.memories


@pytest.fixture(params=[2, 3])
def group(request):
    with Group("shared", request.param) as made:
        yield made


def test_all_ranks_read_one_memory(group):
    """In threads it's mapped at different addresses: what one writes all see."""

    def work(communicator):
        (given,) = communicator.all_reduce([own(communicator.rank)], lend=True)
        (memory,) = memories(communicator)
        assert address(given) == address(memory.buffer)
        communicator.barrier()
        if communicator.rank == 0:
            memory.buffer.view(np.float32)[-1] = 42
        communicator.barrier()
        return given[-1]

    assert set(group.run(work)) == {42}


def test_results_that_one_rank_keeps_stay_as_they_are(group):
    """Of many calls each rank keeps others: no memory is used while anyone reads it."""

    def work(communicator):
        kept = []
        for turn in range(30):
            mine = np.full(LARGE, turn + communicator.rank, np.float32)
            (total,) = communicator.all_reduce([mine], lend=True)
            if turn % 5 == communicator.rank or turn % 7 == 0:
                kept.append((turn, total[turn::1000]))
            del total
            kept = kept[-3:]
        others = sum(range(communicator.size))
        right = [(part == communicator.size * n + others).all() for n, part in kept]
        return right, len(memories(communicator))

    for right, count in group.run(work):
        assert right == [True] * 3
        assert 4 <= count <= 3 * group.size + 1


def test_memory_that_nobody_reads_is_used_again(group):
    def work(communicator):
        for _ in range(200):
            communicator.all_reduce([own(communicator.rank)], lend=True)
        few = len(memories(communicator))
        # And what nobody asks for any more is given back.
        for _ in range(100):
            communicator.all_reduce([own(communicator.rank, 80_000)], lend=True)
        return few, [m.buffer.size for m in memories(communicator)]

    assert set(map(str, group.run(work))) == {str((1, [320_000]))}


def test_without_memory_to_lend_results_are_each_ranks_own(group, monkeypatch):
    def refuse(size):
        raise OSError("no memory")

    monkeypatch.setattr(shared_memory, "create_memory", refuse)
    # Segments grow to their size first: each mapping holds a descriptor.
    group.run(lambda c: c.all_reduce([np.ones(LARGE, np.float32)]))
    before = len(os.listdir("/proc/self/fd"))

    def work(communicator):
        for _ in range(3):
            (total,) = communicator.all_reduce([np.ones(LARGE, np.float32)], lend=True)
        return float(total.min()), memories(communicator)

    assert group.run(work) == [(group.size, [])] * group.size
    assert len(os.listdir("/proc/self/fd")) == before
