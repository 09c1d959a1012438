import logging
import textwrap

import pytest
from devices import CLASSIFIER, begin, run

import kerasdist
from kerasdist.strategies import device_sums as device_ops
from workers import Workers

pytestmark = pytest.mark.timeout(300)
GPUS = [f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in range(4)]
CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(4)]

TRAIN = begin(3) + CLASSIFIER
TRAIN += """
def model_in(scope):
    keras.utils.set_random_seed(1)
    with scope:
        return compiled(keras.Sequential(
            [keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(3)]
        ))

def trained(scope):
    model = model_in(scope)
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return [*history.history.values(), *model.get_weights()]

def same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
"""


def test_gpus_are_added_by_nccl_and_other_devices_on_the_host(monkeypatch):
    assert device_ops.sums_on_devices("auto", GPUS)
    assert not device_ops.sums_on_devices("auto", GPUS[:1])
    assert not device_ops.sums_on_devices("auto", CPUS)
    assert not device_ops.sums_on_devices("auto", [GPUS[0], CPUS[0]])
    assert not device_ops.sums_on_devices("host", GPUS)
    assert device_ops.sums_on_devices("device", CPUS)
    with pytest.raises(ValueError, match=r"^Gradients can be added on devices of one"):
        device_ops.sums_on_devices("device", [GPUS[0], CPUS[0]])
    with pytest.raises(ValueError, match=r"^`local_reduction` must be 'auto', 'dev"):
        kerasdist.RingStrategy(local_reduction="nccl")
    assert device_ops.communication_hint(CPUS[0]) == "ring"
    # There are as many logical GPUs as physical ones: none.
    assert device_ops.communication_hint(GPUS[0]) == "nccl"


@pytest.mark.parametrize(
    ("devices", "size", "asked", "transport", "on_devices", "words"),
    [
        (CPUS, 2, "auto", "shared_memory", False, []),
        (GPUS[:1], 1, "auto", "none", False, []),
        (GPUS, 2, "native", "native", False, []),
        (GPUS[:1], 2, "tcp", "tcp", False, []),
        (GPUS[:1], 2, "auto", "tcp", False, ["WARNING the GPUs of 2 workers exchange"]),
        (GPUS, 1, "auto", "none", True, ["INFO 4 GPUs of this worker add dense grad"]),
        (GPUS, 1, "auto", "none", False, ["WARNING 4 GPUs of this worker add gradien"]),
    ],
)
def test_host_memory_is_never_silent_on_gpus(
    caplog, devices, size, asked, transport, on_devices, words
):
    with caplog.at_level(logging.INFO, "kerasdist"):
        device_ops.report(
            devices, size=size, asked=asked, transport=transport, on_devices=on_devices
        )
    said = [
        f"{record.levelname} {record.getMessage().removeprefix('kerasdist: ')}"
        for record in caplog.records
    ]
    assert len(said) == len(words)
    for text, begin_of_it in zip(said, words, strict=True):
        assert text.startswith(begin_of_it)


@pytest.mark.soak
def test_sums_on_devices_are_those_of_the_host():
    """In graphs and eagerly; nothing listens; a replica that fails spoils nothing."""
    found = run(
        TRAIN,
        """
        import psutil
        def listening():
            found = psutil.Process().net_connections()
            return sum(c.status == psutil.CONN_LISTEN for c in found)

        before = listening()
        strategy = kerasdist.RingStrategy(
            ["CPU:0", "CPU:1", "CPU:2"], local_reduction="device"
        )
        workers = strategy.extended.workers
        ops = workers.ops

        def values(checked):
            found = []
            for dtype in ("float32", "bfloat16", "float64", "int32", "float32"):
                parts = []
                for replica, device in enumerate(workers.devices):
                    with tf.device(device):
                        part = tf.cast(tf.range(6), dtype) * tf.cast(replica + 1, dtype)
                        if dtype == "float32" and replica == 1:
                            part = tf.debugging.check_numerics(part + checked, "failed")
                        parts.append(tf.reshape(part, [2, 3]))
                found.append(parts)
            return found

        def sums(checked):
            return ops.reduce_replicas(values(checked))

        zero = tf.constant(0.0)
        in_graph = tf.function(sums)
        operations = in_graph.get_concrete_function(zero).graph.get_operations()
        where = {op.device for op in operations if op.type == "CollectiveReduceV2"}
        for found in (in_graph(zero), sums(zero), [[v] * 3 for v in
                ops.add_replicas(values(zero))]):
            for value in found:
                for part in value:
                    np.testing.assert_array_equal(
                        np.asarray(tf.cast(part, tf.float64)),
                        6.0 * np.arange(6).reshape(2, 3),
                    )
        failed = message(in_graph, tf.constant(np.inf, tf.float32))
        in_graph(zero)

        same(trained(strategy.scope()), trained(contextlib.nullcontext()))
        steps = int(ops.number.numpy())
        result([sorted(where), failed, listening() - before, steps])
        """,
    )
    where, failed, servers, steps = found
    assert where == CPUS[:3]
    assert failed.startswith("InvalidArgumentError")
    assert servers == 0
    # Those of `fit`, too.
    assert steps > 20


@pytest.mark.soak
def test_workers_with_different_numbers_of_replicas():
    """Each adds its own on its devices, and one sum crosses to the host."""
    script = TRAIN + textwrap.dedent(
        """
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        strategy = kerasdist.RingStrategy(
            ["CPU:1", "CPU:2"] if rank == 0 else ["CPU:0"], local_reduction="device"
        )
        found = trained(strategy.scope())
        if rank == 0:
            assert int(strategy.extended.workers.ops.number.numpy()) > 5
            same(found, trained(contextlib.nullcontext()))
        result([np.asarray(each).tolist() for each in found[-2:]])
        """
    )
    one, other = Workers(script, 2, deadline=250).results()
    assert one == other
