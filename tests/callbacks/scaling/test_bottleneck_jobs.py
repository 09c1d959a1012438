"""Jobs that are limited by their network, and are told so: on real links.

`test_callback.py` has a slow rank and slow data, for every strategy.

What happens once must not count. An epoch begins by making an iterator, which takes
10 ms, and now and then 0.2 s. That of the first epoch isn't measured, as the call that
traces isn't. So all steps of a case together take long, or are in one epoch.
"""

import shutil
import subprocess

import pytest
from scripts import with_prelude

from kerasdist.strategies.measure.machine import MachineUsage
from pace import bound
from workers import Workers

pytestmark = [pytest.mark.timeout(150), pytest.mark.soak, pytest.mark.alone]

SCRIPT = with_prelude("""
import dataclasses, gc
from kerasdist.callbacks import ScalingTensorBoard

tf.config.threading.set_inter_op_parallelism_threads(4)
strategy = kerasdist.RingStrategy(timeout=60)
rank = strategy.rank
x = np.random.default_rng(0).normal(size=(160, 64)).astype("float32")

class Save(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if rank == 0 and epoch == 0:
            time.sleep(3.0)

def run(name, layers, data, callbacks=(), batch=16, epochs=1):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        m = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(1)])
        m.compile("sgd", "mse")
    board = ScalingTensorBoard(sys.argv[1] + "/" + name, verbose=0)
    # That takes some 0.2 s with TensorFlow in memory, on any rank at any time.
    gc.collect()
    gc.disable()
    if isinstance(data, np.ndarray):
        data = tf.data.Dataset.from_tensor_slices((data, data[:, :1])).batch(batch)
    m.fit(data, epochs=epochs, verbose=0, callbacks=[board, *callbacks])
    if board.figures is None:
        return None
    return [dataclasses.asdict(board.figures), dataclasses.asdict(board.verdict)]
""")

RATE = 25e6  # bytes per second

REMOTE = """
print("RESULT", json.dumps({
    "large": run("large", [keras.layers.Dense(6000)], x, epochs=2),
    "small": run("small", [keras.layers.Dense(8)], np.tile(x, (60, 1))),
    "saving": run("saving", [], x, [Save()], epochs=2),
}))
"""


@pytest.mark.netns
def test_what_limits_a_job_on_two_hosts(two_hosts, tmp_path):
    """The link's rate is what the network shapes it to."""
    if shutil.which("tc") is None:
        pytest.skip("there is no `tc` (package iproute2)")
    for host in range(2):
        shape = f"tc qdisc add dev eth0 root tbf rate {RATE * 8:.0f} burst 32kb"
        command = [*two_hosts.prefix(host), *shape.split(), "latency", "400ms"]
        subprocess.run(command, check=True, timeout=bound(30))
    with Workers(
        SCRIPT + REMOTE,
        2,
        [str(tmp_path)],
        deadline=120,
        cluster=two_hosts.addresses,
        prefix=two_hosts.prefix,
    ) as job:
        found = job.succeed()[0].result
    figures, verdict = found["large"]
    assert verdict["limit"] == "network", figures["phases"]
    # Of two workers each sends half of it twice; frames have headers.
    size = 4 * (64 * 6000 + 6000 + 6000 + 1)
    assert size < figures["bytes_per_step"] < 1.02 * size
    assert 0.8 * RATE < figures["link"] < 1.2 * RATE
    assert 0.6 * RATE < figures["bandwidth"] < 1.2 * RATE
    traffic = figures["phases"]["communicate"] + figures["phases"]["wait"]
    assert 0.8 * size / RATE < traffic < 2 * size / RATE
    # Each host sends and receives that, in the steps that are counted at least.
    for rank in "01":
        used = MachineUsage(*figures["machines"][rank])
        assert used.network > 2 * size * figures["steps"]
        assert used.per_second("network") < 2.4 * RATE
        assert used.cpu > 0
    figures, verdict = found["small"]
    assert verdict["limit"] == "batch", figures["phases"]
    assert any(reason.startswith("It isn't the link") for reason in verdict["because"])
    # What one rank does between two epochs isn't a part of any step, on no rank. It's
    # a mean over both, of which the other one would wait 3 s.
    figures = found["saving"][0]
    assert figures["phases"]["wait"] * figures["steps"] < 1, figures["phases"]
