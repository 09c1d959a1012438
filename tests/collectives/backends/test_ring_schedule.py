"""The ring schedule, as pure functions."""

from __future__ import annotations

import pytest

from kerasdist.collectives.ring import (
    all_gather_steps,
    reduce_scatter_steps,
)

SIZES = range(1, 10)


@pytest.mark.parametrize("size", SIZES)
def test_what_a_rank_sends_is_what_its_right_neighbour_receives(size):
    for steps in (
        [list(reduce_scatter_steps(rank, size)) for rank in range(size)],
        [list(all_gather_steps(rank, size, 0)) for rank in range(size)],
        [list(all_gather_steps(rank, size, 1)) for rank in range(size)],
    ):
        for rank in range(size):
            right = steps[(rank + 1) % size]
            assert [sent for sent, _ in steps[rank]] == [got for _, got in right]


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_and_all_gather_give_every_rank_every_sum(size):
    # What has been summed into each chunk, on each rank: in one order everywhere.
    held = [{c: (rank,) for c in range(size)} for rank in range(size)]
    for step in range(size - 1):
        moves = [list(reduce_scatter_steps(rank, size))[step] for rank in range(size)]
        sent = [held[rank][moves[rank][0]] for rank in range(size)]
        for rank in range(size):
            received = moves[rank][1]
            held[rank][received] = sent[rank - 1] + held[rank][received]
    for rank in range(size):
        assert sorted(held[rank][(rank + 1) % size]) == list(range(size))
    for step in range(size - 1):
        moves = [list(all_gather_steps(rank, size, 1))[step] for rank in range(size)]
        sent = [held[rank][moves[rank][0]] for rank in range(size)]
        for rank in range(size):
            held[rank][moves[rank][1]] = sent[rank - 1]
    assert all(mine == held[0] for mine in held)
    assert all(sorted(order) == list(range(size)) for order in held[0].values())
