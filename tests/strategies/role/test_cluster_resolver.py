import json

import pytest
import tensorflow as tf
from tensorflow.python.distribute import multi_worker_util

import kerasdist
from kerasdist import errors
from kerasdist.cluster import resolve
from kerasdist.strategies.cluster_resolver import given_cluster, resolver_of

ONE = {"worker": ["127.0.0.1:1"]}


def is_chief(task_type, task_id, cluster_spec):
    """As TensorFlow's guide of `MultiWorkerMirroredStrategy` has it."""
    return (
        task_type is None
        or task_type == "chief"
        or (
            task_type == "worker"
            and task_id == 0
            and "chief" not in cluster_spec.as_dict()
        )
    )


@pytest.mark.parametrize(
    "jobs",
    [
        ONE,
        {"worker": ["h:1", "h:2", "h:3"]},
        {"worker": ["h:1", "h:2"], "ps": ["h:3"]},
        {"chief": ["h:1"], "worker": ["h:2", "h:3"]},
        {"chief": ["h:1"], "worker": ["h:2"], "ps": ["h:3", "h:4"]},
    ],
)
def test_the_idioms_of_scripts_find_the_chief(jobs):
    for kind in ("chief", "worker"):
        for index in range(len(jobs.get(kind, ()))):
            place = resolve({"cluster": jobs, "task": {"type": kind, "index": index}})
            resolver = resolver_of(place, place.rank or 0, place.size)
            spec = resolver.cluster_spec()
            task = resolver.task_type, resolver.task_id
            assert is_chief(*task, spec) == place.is_chief, task
            if spec.as_dict():
                found = multi_worker_util.is_chief(spec, *task)
                assert found == place.is_chief
                assert multi_worker_util.id_in_cluster(spec, *task) == place.rank


@pytest.mark.parametrize(
    "make",
    [
        kerasdist.RingStrategy,
        kerasdist.ParameterServerStrategy,
        lambda **arguments: kerasdist.ParameterServerStrategy("async", **arguments),
        lambda **arguments: kerasdist.ModelParallelStrategy({}, **arguments),
    ],
    ids=["ring", "sync", "async", "model_parallel"],
)
def test_it_is_an_argument_of_every_strategy(make, monkeypatch):
    other = {"cluster": {"worker": ["127.0.0.1:2", "127.0.0.1:3"]}}
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({**other, "task": {"type": "worker", "index": 1}})
    )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(ONE), task_type="worker", task_id=0
    )
    with pytest.raises(errors.ClusterError, match=r"^`cluster` and `cluster_resolver`"):
        make(cluster=resolver, cluster_resolver=resolver)
    with make(cluster_resolver=resolver) as strategy:
        strategy.scope()
        known = strategy.cluster_resolver
        assert (known.task_type, known.task_id) == ("worker", 0)
        assert is_chief(known.task_type, known.task_id, known.cluster_spec())
        assert isinstance(known, tf.distribute.cluster_resolver.ClusterResolver)
        assert (strategy.rank, strategy.size, strategy.is_chief) == (0, 1, True)
        assert (strategy.local_rank, strategy.local_size) == (0, 1)
        # What TensorFlow looks for to take a strategy for one of its own.
        assert not hasattr(strategy.extended, "_cluster_resolver")


def test_a_dictionary_is_no_resolver():
    with pytest.raises(errors.ClusterError, match=r"^`cluster_resolver` isn't a res"):
        given_cluster(None, {"cluster": ONE})
    assert given_cluster({"cluster": ONE}, None) == {"cluster": ONE}
    assert given_cluster(None, None) is None
