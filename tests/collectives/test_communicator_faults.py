import threading

import numpy as np
import pytest
from soak import soak

from groups import Group, outcomes
from kerasdist import errors
from pace import bound
from waiting import wait_until

# One group of each implementation.
SOME = [("unix", 3), ("shared", 4), ("tcp", 3), ("aab", 3)]


def ids(kind):
    return f"{kind[0]}-{kind[1]}"


def ended(group, results, expected):
    assert [type(result) for result in results] == [expected] * group.size, results
    assert len({str(result) for result in results}) == 1
    for communicator in group.communicators:
        assert type(communicator.failure) is expected
        with pytest.raises(expected) as again:
            communicator.barrier()
        assert str(again.value) == str(results[0])
    return str(results[0])


def reduce(shape, dtype="float64", op="sum"):
    return lambda c: c.all_reduce([np.ones(shape, dtype)], op)


def broadcast(root):
    return lambda c: c.broadcast([np.ones(3)], root)


def gather(columns):
    return lambda c: c.all_gather(np.ones((3, columns)))


OTHERS = "on buffers of other dtypes or shapes"
REDUCE = "#2 all_reduce(op='sum', dtype=float64, elements=3)"
# What most of the ranks call, what one calls, and what is said of both.
DIFFERENT = [
    (reduce(3, op="max"), reduce(3, op="min"), ["op='max'", "op='min'"]),
    (reduce(3, "float32"), reduce(3, "int32"), ["dtype=float32", "dtype=int32"]),
    (reduce(3), reduce(100_000), ["elements=3", "elements=100000"]),
    (reduce((2, 3)), reduce((3, 2)), ["on buffers float64(", f"elements=6) {OTHERS}"]),
    (broadcast(0), broadcast(2), ["root=0", "root=2"]),
    (gather(2), gather(4), ["on buffers float64(", OTHERS]),
    (reduce(1_000_000), broadcast(0), ["all_reduce(", "broadcast("]),
    (reduce(3), lambda c: c.barrier(), [REDUCE, "#2 barrier()", "rank 1 ("]),
]


@pytest.mark.parametrize("kind", SOME[1:], ids=ids)
@pytest.mark.parametrize(("most", "odd", "said"), DIFFERENT)
def test_every_difference_is_a_mismatch_on_every_rank(kind, most, odd, said):
    with Group(*kind) as group:
        group.run(lambda c: c.all_reduce([np.ones(3)]))

        def work(communicator):
            odd(communicator) if communicator.rank == 1 else most(communicator)
            # A root, for one, needs nobody's answer: it finds out at its next call.
            communicator.barrier()

        results = group.outcomes(work)
        text = ended(group, results, errors.CollectiveMismatch)
    assert text.startswith("Ranks called different collectives at step 0. Received: ra")
    for part in said:
        assert part in text


@pytest.mark.parametrize(
    ("layout", "late"), [soak("tcp", [2, 3]), soak("aabb", [1]), ("abab", [3, 1])]
)
def test_late_ranks_are_named_and_not_their_neighbours(layout, late):
    """In a ring everybody waits for a neighbour that waits itself."""

    def work(communicator):
        communicator.barrier()
        if communicator.rank in late:
            # Before it has heard of the others' end, they might seem to have come.
            wait_until(lambda: communicator.failure is not None, "the end")
        communicator.barrier()

    with Group(layout, 4, timeout=bound(1.0)) as group:
        text = ended(group, group.outcomes(work), errors.CollectiveTimeout)
    names, _, rest = text.partition(" didn't join #2 barrier() in time; rank ")
    assert [rank for rank in range(4) if f"rank {rank} (" in names] == sorted(late)
    assert "`timeout=`" in rest


@pytest.mark.parametrize("kind", SOME, ids=ids)
@pytest.mark.parametrize("ending", ["abort", "close"])
def test_a_wait_ends_when_another_thread_aborts_or_closes(kind, ending):
    with Group(*kind) as group:
        waiting = group.communicators[0]
        result = []

        def wait():
            result.extend(outcomes(1, lambda _: waiting.all_reduce([np.ones(3)])))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        wait_until(lambda: waiting.supervisor.call.kind == "all_reduce", "the call")
        getattr(waiting, ending)()
        thread.join(bound(15))
        assert not thread.is_alive()
        assert type(result[0]) is errors.TransportClosed
        pattern = {
            "abort": "was aborted. Create",
            "close": "was closed during #1 all_red",
        }
        assert str(result[0]).startswith(f"This communicator {pattern[ending]}")
        with pytest.raises(errors.TransportClosed):
            waiting.barrier()


@pytest.mark.parametrize("kind", [("connected_shared", 3), ("aab", 3)], ids=ids)
@pytest.mark.parametrize(
    ("leaver", "error", "reason"),
    [
        (-1, None, "it closed its strategy while others still needed it"),
        (0, ValueError("no such file." + "x" * 5000), "its script ended with ValueErr"),
    ],
)
def test_a_rank_that_leaves_early_is_named_by_all_others(kind, leaver, error, reason):
    with Group(*kind) as group:
        leaver %= group.size

        def work(communicator):
            communicator.step = 3
            communicator.barrier()
            if communicator.rank == leaver:
                group.jobs[leaver].close(error)
                return None
            communicator.all_reduce([np.ones(3)])

        results = group.outcomes(work)
        assert results.pop(leaver) is None
        for found in results:
            assert type(found) is errors.WorkerLost
            assert (found.rank, found.step) == (leaver, 3)
            assert found.host == group.jobs[leaver].cluster.address
            assert found.reason.startswith(reason)
            assert len(str(found)) < 2000


def test_ranks_may_leave_one_after_the_other_when_nobody_needs_them():
    with Group("tcp", 4) as group:
        group.run(lambda c: c.barrier())
        for rank in (0, 2, 1, 3):
            group.jobs[rank].close()
        assert [job.failure for job in group.jobs] == [None] * 4


def test_the_kept_failure_holds_no_arrays():
    """An exception's traceback would keep all buffers of the failed call alive."""
    with Group("shared", 2, timeout=0.2) as group:
        for communicator in group.communicators:
            with pytest.raises(errors.CollectiveError):
                communicator.all_reduce([np.ones(3)])
            assert communicator.failure.__traceback__ is None
            assert communicator.failure.__cause__ is None
