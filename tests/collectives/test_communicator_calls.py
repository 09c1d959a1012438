"""How communicators take calls: in sequence, from threads, wrong ones, when closed."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from test_communicator import (
    COMPLEX,
    FLOATS,
    INTS,
    dtype_of,
    reference,
    same_bytes,
    values,
)

from groups import KINDS, Group
from kerasdist import errors
from pace import bound

pytestmark = pytest.mark.timeout(60)


# Sequences.


@pytest.mark.parametrize("seed", range(2))
def test_random_sequences_of_collectives(group, seed):
    """Any sequence of any collectives, with ranks that run ahead of each other."""
    script = np.random.default_rng([6, seed])
    plan = []
    for _ in range(60):
        kind = script.choice(["all_reduce", "all_gather", "broadcast", "barrier"])
        # Around the size from which shared memory uses another region.
        scale = script.choice([3, 100, 8_000, 8_193, 40_000])
        counts = script.integers(0, scale + 1, size=group.size)
        names = script.choice([*INTS, *FLOATS, *COMPLEX], size=script.integers(0, 4))
        op = script.choice(["sum", "prod", "min", "max"])
        root = int(script.integers(group.size))
        lend = bool(script.integers(2))
        plan.append((str(kind), counts, names, str(op), root, lend))

    def inputs(rank, number, counts, names):
        g = np.random.default_rng([7, seed, number, rank])
        return [values(g, int(counts[0]), str(name), rank) for name in names]

    def work(communicator):
        rank = communicator.rank
        pace = np.random.default_rng([8, seed, rank])
        for number, (kind, counts, names, op, root, lend) in enumerate(plan):
            np.ones(pace.integers(1, 30_000)).sum()
            everyone = [inputs(r, number, counts, names) for r in range(group.size)]
            if kind == "barrier":
                communicator.barrier()
            elif kind == "broadcast":
                result = communicator.broadcast(everyone[rank], root)
                assert same_bytes([result, everyone[root]]), (number, rank)
            elif kind == "all_gather":
                rows = [np.full((int(n), 2), r) for r, n in enumerate(counts)]
                result = communicator.all_gather(rows[rank])
                assert same_bytes([result, rows]), (number, rank)
            else:
                if any(dtype_of(str(name)).kind == "c" for name in names):
                    op = "sum"
                result = communicator.all_reduce(everyone[rank], op, lend=lend)
                for i, array in enumerate(result):
                    expected = reference([mine[i] for mine in everyone], op)
                    np.testing.assert_array_equal(array, expected, f"{number} {rank}")

    group.run(work)


def test_regions_of_shared_memory_are_not_reused_too_early(group):
    """Each value differs from all earlier ones: a stale or early one would show."""
    size = group.size

    def work(communicator):
        pace = np.random.default_rng([9, communicator.rank])
        for turn in range(1, 100):
            elements = (1, 16_384, 8_192, 3, 16_385, 40_000)[turn % 6]
            base = turn * size
            (total,) = communicator.all_reduce(
                [np.full(elements, base + communicator.rank, np.int32)]
            )
            assert (total == base * size + sum(range(size))).all(), turn
            if pace.integers(4) == 0:
                np.ones(pace.integers(1, 100_000)).sum()
            (given,) = communicator.broadcast(
                [np.full(elements, base + communicator.rank)], turn % size
            )
            assert (given == base + turn % size).all(), turn
            parts = communicator.all_gather(
                np.full(elements // 2, base + communicator.rank)
            )
            for rank, part in enumerate(parts):
                assert (part == base + rank).all(), turn

    group.run(work)


# Arguments.


NUMBERS = r"^A collective moves arrays of numbers"
# What is called, and the error.
WRONG = [
    (
        lambda c: c.all_reduce([1], "mean"),
        ValueError,
        r"^Unknown reduction\. Received: op='mean'; expected one of \('sum', 'prod', ",
    ),
    (
        lambda c: c.all_reduce([1.0], "max", scale=0.5),
        ValueError,
        r"^A scale is only for sums\. Received: scale=0\.5, op='max'\. Use",
    ),
    (
        lambda c: c.all_reduce([1.0, 1], scale=0.5),
        TypeError,
        r"^Only floats can be scaled\. Received: scale=0\.5, dtype=int64; expected",
    ),
    (
        lambda c: c.all_reduce([1, True], "sum"),
        TypeError,
        r"^'sum' has no meaning on bool\. Received: op='sum', dtype=bool\. Use 'max'",
    ),
    (
        lambda c: c.all_reduce([1j], "min"),
        TypeError,
        r"^Complex numbers have no order\. Received: op='min', dtype=complex128",
    ),
    (
        lambda c: c.all_reduce([1, "a"]),
        TypeError,
        r"^A collective moves arrays of .* Received: dtype=dtype\('<U1'\)",
    ),
    (
        lambda c: c.all_reduce([np.zeros(2, ">f4")]),
        TypeError,
        r"^A collective moves .* byte order\. Received: dtype=dtype\('>f4'\)",
    ),
    (lambda c: c.all_reduce([np.zeros(2, "M8[s]")]), TypeError, NUMBERS),
    (
        lambda c: c.all_reduce(np.zeros((2, 3))),
        TypeError,
        r"^A collective takes a list .* Received: one array of shape \(2, 3\)\.",
    ),
    (lambda c: c.all_reduce(3), TypeError, r"not iterable$"),
    (lambda c: c.all_reduce([[1, [2]]]), ValueError, r"inhomogeneous shape"),
    (lambda c: c.all_gather(["a"]), TypeError, NUMBERS),
    (
        lambda c: c.broadcast([1], root=-1),
        ValueError,
        r"^There is no such rank\. Received: root=-1; expected 0 to \d\.$",
    ),
    (lambda c: c.broadcast([1], root=c.size), ValueError, r"^There is no such rank"),
    (lambda c: c.broadcast([1], root=0.0), TypeError, r"as an integer$"),
    (lambda c: c.broadcast([object()]), TypeError, NUMBERS),
]


def test_wrong_arguments_are_refused_and_the_communicator_stays_usable(group):
    def work(communicator):
        if communicator.rank == group.size - 1:  # the others don't even notice
            for call, error, match in WRONG:
                with pytest.raises(error, match=match):
                    call(communicator)
        return communicator.all_reduce([1])[0].tolist()

    assert group.run(work) == [group.size] * group.size


def test_calls_of_several_threads_are_done_one_after_the_other(group):
    """An all-gather is two exchanges: no other thread's call may come between.

    All threads make the same call, so their order doesn't matter.
    """
    expected = [np.full((r, 2), r) for r in range(group.size)]

    def work(communicator):
        good = []

        def calls():
            for _ in range(15):
                parts = communicator.all_gather(expected[communicator.rank])
                good.append(same_bytes([parts, expected]))

        threads = [threading.Thread(target=calls, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(bound(30))
        return len(good), all(good)

    assert group.run(work) == [(45, True)] * group.size


def test_rank_size_and_step(group):
    def work(communicator):
        communicator.step = 12
        return (
            communicator.rank,
            communicator.size,
            communicator.step,
            communicator.failure,
        )

    assert group.run(work) == [(r, group.size, 12, None) for r in range(group.size)]


# Closing.


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_after_close_every_call_says_so(kind, size):
    with Group(kind, size) as group:
        group.run(lambda c: c.all_reduce([np.ones(3)]))
        group.close()
        group.close()
        calls = {
            "all_reduce": lambda c: c.all_reduce([1]),
            "all_gather": lambda c: c.all_gather([1]),
            "broadcast": lambda c: c.broadcast([1]),
            "barrier": lambda c: c.barrier(),
        }
        for name, call in calls.items():
            with pytest.raises(
                errors.TransportClosed,
                match=rf"^This communicator is closed\. Received: a call of {name}\.",
            ):
                call(group.communicators[0])
