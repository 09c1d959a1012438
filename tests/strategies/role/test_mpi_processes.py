"""Strategies that can't use MPI refuse several processes of `mpirun`."""

from __future__ import annotations

import pytest

import kerasdist
from kerasdist.errors import ClusterError


@pytest.fixture
def started(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_there_are_no_servers(started, mode):
    with pytest.raises(
        ClusterError, match=r"^ParameterServerStrategy can't connect 4 "
    ) as caught:
        kerasdist.ParameterServerStrategy(mode)
    assert "`kerasdist run -n 4 --ps 1` or with TF_CONFIG" in str(caught.value)


def test_devices_of_others_cant_be_reached(started):
    with pytest.raises(ClusterError, match=r"^ModelParallelStrategy can't connect 4 "):
        kerasdist.ModelParallelStrategy({})


def test_the_number_of_processes_may_be_unknown(monkeypatch):
    monkeypatch.setenv("PMIX_RANK", "1")
    with pytest.raises(
        ClusterError, match=r"can't connect processes that were started"
    ):
        kerasdist.ModelParallelStrategy({})


def test_elastic_jobs_are_refused(started):
    with pytest.raises(ValueError, match="transport='mpi', whose group of processes"):
        kerasdist.RingStrategy(elastic=True)


def test_other_transports_are_refused(started):
    with pytest.raises(
        ClusterError, match=r"^Processes that were started by MPI don't"
    ):
        kerasdist.RingStrategy(transport="tcp")
