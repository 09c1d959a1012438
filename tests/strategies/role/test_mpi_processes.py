import pytest

import kerasdist
from kerasdist.errors import ClusterError


@pytest.fixture
def started(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")


SERVERS = r"^ParameterServerStrategy can't connect 4 .*`kerasdist run -n 4 --ps 1` or w"


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: kerasdist.ParameterServerStrategy("sync"), ClusterError, SERVERS),
        (lambda: kerasdist.ParameterServerStrategy("async"), ClusterError, SERVERS),
        (lambda: kerasdist.ModelParallelStrategy({}), ClusterError, r"^ModelParallelS"),
        (
            lambda: kerasdist.RingStrategy(elastic=True),
            *(ValueError, "transport='mpi', whose group of processes"),
        ),
        (
            lambda: kerasdist.RingStrategy(transport="tcp"),
            *(ClusterError, r"^Processes that were started by MPI don't"),
        ),
    ],
)
def test_several_processes_are_refused(started, make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_the_number_of_processes_may_be_unknown(monkeypatch):
    monkeypatch.setenv("PMIX_RANK", "1")
    with pytest.raises(ClusterError, match=r"can't connect processes that were"):
        kerasdist.ModelParallelStrategy({})
