import threading

import numpy as np
import pytest
from soak import soak
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


@pytest.mark.parametrize("seed", [0, soak(1)])
def test_random_sequences_of_collectives(group, seed):
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


# What is called, and the error.
WRONG = [
    (lambda c: c.all_reduce([1], "mean"), ValueError, r"^Unknown .* op='mean'; expec"),
    (lambda c: c.all_reduce([1.0], "max", scale=0.5), ValueError, r"^A .* for sums\."),
    (lambda c: c.all_reduce([1.0, 1], scale=0.5), TypeError, r"^Only floats can be s"),
    (lambda c: c.all_reduce([1, True]), TypeError, r"^'sum' has no meaning on bool\."),
    (lambda c: c.all_reduce([1j], "min"), TypeError, r"^Complex numbers have no order"),
    (lambda c: c.all_reduce([1, "a"]), TypeError, r" Received: dtype=dtype\('<U1'\)"),
    (lambda c: c.all_reduce([np.zeros(2, ">f4")]), TypeError, r"byte order\. Received"),
    (lambda c: c.all_reduce(np.zeros((2, 3))), TypeError, r"one array of shape \(2, 3"),
    (lambda c: c.all_gather(["a"]), TypeError, r"^A collective moves arrays of num"),
    (lambda c: c.broadcast([1], root=-1), ValueError, r"Received: root=-1; expected 0"),
    (lambda c: c.broadcast([1], root=0.0), TypeError, r"as an integer$"),
]


def test_wrong_arguments_are_refused_and_the_communicator_stays_usable(group):
    def work(communicator):
        # What was valid once makes no other call valid.
        communicator.all_reduce([1.0, 1])
        communicator.all_reduce([1.0, 1], scale=0.5, unscaled=1)
        communicator.all_reduce([1, True], "max")
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
