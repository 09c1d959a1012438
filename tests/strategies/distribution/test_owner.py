import json

import pytest

from kerasdist.errors import ClusterError
from kerasdist.strategies.distribution import StrategyOwner

TWO = "10.0.0.1:1234, 10.0.0.2:2345"


@pytest.fixture(autouse=True)
def _without_a_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def config(*addresses, index):
    return json.dumps(
        {
            "cluster": {"worker": list(addresses)},
            "task": {"type": "worker", "index": index},
        }
    )


def test_arguments_are_the_cluster():
    owner = StrategyOwner(None)
    owner.initialize(TWO, 2, 1)
    assert owner.devices(["cpu:0"]) == ["cpu:0", "cpu:1"]


def test_without_arguments_it_is_that_of_the_environment(monkeypatch):
    owner = StrategyOwner(None)
    owner.initialize(None, None, None)
    assert owner.devices(["cpu:0"]) == ["cpu:0"]
    monkeypatch.setenv("TF_CONFIG", config("a:1", "b:2", "c:3", index=1))
    assert owner.devices(["cpu:0"]) == ["cpu:0", "cpu:1", "cpu:2"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("10.0.0.1:1234", 2, 0),  # enough for JAX
        (TWO, 3, 0),
        (TWO, 2, None),
        (None, 2, 0),
    ],
)
def test_incomplete_arguments_are_refused(arguments):
    with pytest.raises(ClusterError, match=r"the addresses of all processes.*run`\.$"):
        StrategyOwner(None).initialize(*arguments)


def test_two_descriptions_must_be_the_same(monkeypatch):
    addresses = ("10.0.0.1:1234", "10.0.0.2:2345")
    monkeypatch.setenv("TF_CONFIG", config(*addresses, index=1))
    StrategyOwner(None).initialize(TWO, 2, 1)
    with pytest.raises(ClusterError, match="There are two descriptions"):
        StrategyOwner(None).initialize(TWO, 2, 0)
