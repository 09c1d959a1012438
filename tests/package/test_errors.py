import copy
import pickle
import re

import pytest

from kerasdist import errors

MADE = [
    *(
        errors.KerasDistError("a"),
        errors.ClusterError("a"),
        errors.CollectiveError("a"),
    ),
    *(errors.AddressInUseError("a"), errors.AuthenticationError("a")),
    *(errors.ProtocolError("a"), errors.CollectiveMismatch("a")),
    *(errors.CollectiveTimeout("a"), errors.SharedMemoryFull("a")),
    *(errors.SnapshotError("a"), errors.TransportClosed("a")),
    errors.StartupError("a", {2: "it isn't there"}),
    errors.WorkerLost(3, "host3:2222", 17, "it was killed", others_go_on=True),
    errors.ServerLost(1, "host9:2222", 17, "it was killed", held_weights=False),
    errors.IncompatibleKerasError("4.0.0", ["a is missing"], "3.14 to 3.15"),
    errors.IncompatibleTensorFlowError("3.0.0", ["a is missing"], "2.18 to 2.21"),
    errors.IncompatibleVersionError("1.0", ["a is missing"], "2.0"),
    errors.FunctionError("a", 1, "Traceback"),
    errors.PlanError("a", ("b",)),
]


def name(error):
    return type(error).__name__


def test_every_exception_is_in_the_list_and_in_the_drawing():
    assert sorted(map(name, MADE)) == errors.__all__
    drawn = re.findall(r"── (\w+)|^    (\w+) ", errors.__doc__, re.MULTILINE)
    assert sorted({a or b for a, b in drawn} - {"s"}) == errors.__all__


@pytest.mark.parametrize("error", MADE, ids=name)
def test_copies_and_pickles_are_the_same(error):
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)


def test_worker_lost_says_who_where_when_why_and_what_to_do():
    error = errors.WorkerLost(3, "host3:2222", 17, "its connection was closed")
    assert str(error) == (
        "Rank 3 (host3:2222) was lost at step 17: its connection was closed. The other "
        "workers can't go on without it. Look at the output of rank 3 for the first "
        "error, then start the job again."
    )
    found = (error.rank, error.host, error.step, error.reason)
    assert found == (3, "host3:2222", 17, "its connection was closed")
    assert str(errors.WorkerLost(3, "h:1", 17, "it was frozen", True)).endswith(
        ": it was frozen. The other workers go on without it. A new process with its "
        "task may join them."
    )
