import json
import signal
import textwrap

import pytest
from devices import CLASSIFIER, begin
from soak import soak

from kerasdist.strategies.placed.remote import named_in
from workers import Workers

PRELUDE = begin(2) + CLASSIFIER
PRELUDE += """
import ctypes
from kerasdist.strategies.placed import remote

rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
ONE, TWO = "/job:worker/task:1/CPU:1", "/job:worker/task:{}/device:CPU:0"

def place(first="CPU:0", last=1, **options):
    return kerasdist.ModelParallelStrategy(
        {"one": ONE, "two": TWO.format(last)},
        devices=[first, ONE, TWO.format(last)],
        **{"heartbeat_timeout": 2, "startup_timeout": 30, **options},
    )

def build():
    keras.utils.set_random_seed(1)
    return compiled(keras.Sequential([
        keras.layers.Dense(16, activation="relu", name="one"),
        keras.layers.Dropout(0.2),
        keras.layers.BatchNormalization(name="two"),
        keras.layers.Dense(3, name="three"),
    ]))

class Say(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if batch == 2:
            print("TRAINING", flush=True)
"""


def script(text):
    return PRELUDE + textwrap.dedent(text)


def test_layers_on_other_workers_train_as_they_do_in_one_process(tmp_path):
    # gRPC would take the proxy to 127.0.0.1, too, and wait for ever: nobody is there.
    proxies = dict.fromkeys(["http_proxy", "https_proxy"], "http://127.0.0.1:9")
    job = Workers(
        script("""
        placed = place("/job:worker/task:2/CPU:1", last=2)
        with placed.scope():
            model = build()
        found = numbers(model)
        devices = {
            variable.path: variable.value.device.removeprefix("/job:worker/replica:0")
            for variable in [*model.variables, *model.optimizer.variables]
        }
        path = os.path.join(sys.argv[1], "model.keras")
        model.save(path)
        loaded = keras.models.load_model(path)
        alone = build()
        print("RESULT", json.dumps({
            "placed": found,
            "alone": numbers(alone),
            "predicted": PREDICTED,
            "loaded": np.asarray(loaded.predict(x, verbose=0)).tolist(),
            "devices": devices,
            "all": list(placed.devices),
            "ran": {
                place.layer: [place.device[-20:], place.forward > 0, place.backward > 0]
                for place in placed.placement_report().steps["train"].layers
                if place.layer.startswith("sequential")
            },
        }), flush=True)
        model.fit(x, y, batch_size=16, verbose=0, callbacks=[
            kerasdist.callbacks.Timeline(sys.argv[1] + "/trace.json", steps=(1, 3))])
        """),
        3,
        args=[str(tmp_path)],
        env=proxies,
    )
    with job:
        chief, *others = job.succeed()
    assert [other.results for other in others] == [[], []]  # they only serve
    found = chief.result

    assert found["placed"] == found["alone"]
    assert found["loaded"] == found["alone"][found["predicted"]]
    assert found["all"] == [
        "/job:worker/replica:0/task:2/device:CPU:1",
        "/job:worker/replica:0/task:1/device:CPU:1",
        "/job:worker/replica:0/task:2/device:CPU:0",
    ]
    assert found["ran"]["sequential/one"] == ["/task:1/device:CPU:1", True, True]
    assert found["ran"]["sequential/two"] == ["/task:2/device:CPU:0", True, True]
    assert found["ran"]["sequential/three"] == ["/task:2/device:CPU:1", True, True]
    one, two, rest = (
        {device for name, device in found["devices"].items() if part in name}
        for part in ("one", "two", "three")
    )
    assert one == {"/task:1/device:CPU:1"}
    assert two == {"/task:2/device:CPU:0"}
    assert rest == {"/task:2/device:CPU:1"}

    # A timeline has their stages, on the chief's clock.
    trace = json.loads((tmp_path / "trace.json").read_text())
    error = trace["otherData"]["clock_error_us"]["0"]
    assert 0 < error < 20_000
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    steps = [e for e in spans if e["name"].startswith("step ")]
    assert [step["name"] for step in steps] == ["step 1", "step 2"]
    for stage in range(3):
        lane = [e for e in spans if e["tid"] == 1501 + stage]
        for step in steps:
            begin, end = step["ts"] - error, step["ts"] + step["dur"] + error
            assert any(begin < e["ts"] <= e["ts"] + e["dur"] < end for e in lane)


@pytest.mark.parametrize("number", [soak(signal.SIGKILL), signal.SIGSTOP])
def test_a_lost_worker_is_named_in_time(number, tmp_path):
    text = """
    placed = place(last=2)
    with placed.scope():
        model = build()

    class Add(Say):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            if batch == 2 and sys.argv[2] == "SIGSTOP":
                while not os.path.exists(sys.argv[1] + "/frozen"):
                    time.sleep(0.01)
                # TensorFlow calls the frozen worker, with the interpreter's lock.
                tf.function(lambda: tf.constant(1)).get_concrete_function()

    say = Add()
    # Of unknown length: each epoch ends with a call that finds no data.
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16).filter(
        lambda x, y: True)
    try:
        model.fit(data, epochs=10_000, verbose=0, callbacks=[say])
    except kerasdist.WorkerLost as error:
        begun = time.monotonic()
        try:
            model.get_weights()
        except tf.errors.OpError:
            found = [error.rank, str(error), error.step - say.steps, say.steps]
            print("RESULT", json.dumps(found), flush=True)
        placed.close()
    """
    with Workers(script(text), 3, args=[str(tmp_path), number.name]) as job:
        job.wait_for_line(0, "TRAINING")
        job.kill(2, number)
        (tmp_path / "frozen").touch()
        chief = job.wait_one(0, 15)
        other = job.wait_one(1, 15)
        assert job.is_running(2) == (number == signal.SIGSTOP)
    assert chief.returncode == 0
    lost, message, ahead, steps = chief.result
    assert lost == 2
    # In the midst of a step, or between two.
    assert ahead in (0, 1)
    assert steps >= 3
    begin = f"Rank 2 ({job.addresses[2]}) was lost at step {steps + ahead}: "
    assert message.startswith(begin)
    assert other.returncode == 1
    assert f"WorkerLost: {begin}" in other.output


def test_workers_end_when_the_chief_is_lost():
    text = """
    # Destructors that crash, as oneDNN's do while an operation still runs.
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.abort, None, None)
    placed = place()
    with placed.scope():
        model = build()
    model.fit(x, y, batch_size=16, epochs=10_000, verbose=0, callbacks=[Say()])
    """
    with Workers(script(text), 2) as job:
        job.wait_for_line(0, "TRAINING")
        job.kill(0)
        other = job.wait_one(1, 15)
    assert other.returncode == 1  # its own, by no signal
    assert "WorkerLost: Rank 0" in other.output


def test_a_start_that_fails_says_who_is_missing_and_why():
    """TensorFlow alone would wait for ever, and say nothing."""
    text = """
    real_serve = remote.remote.serve_devices

    def elsewhere(*arguments):
        server, port = real_serve(*arguments)
        return server, 1  # which can't be reached
    remote.remote.serve_devices = elsewhere
    try:
        place()
    except kerasdist.errors.StartupError as error:
        print("RESULT", json.dumps([error.missing, str(error)]), flush=True)
    """
    with Workers(script(text), 2) as job:
        chief, _ = job.wait(40)
    missing, unreachable = chief.result
    assert missing.keys() == {"1"}
    assert "from rank 0: connection refused" in missing["1"]
    assert "does a firewall or a network policy allow" in unreachable


def test_what_it_refuses_before_it_waits():
    text = """
    found = []
    addresses = {"worker": ["127.0.0.1:1", "127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    for cluster, task in [
        (addresses, {"type": "ps", "index": 0}),
        ({"worker": ["10.0.0.1:1", "10.0.0.2:1"]}, {"type": "worker", "index": 0}),
        ({"worker": ["127.0.0.1:1"]}, {"type": "worker", "index": 3}),
        ({"worker": addresses["worker"]}, {"type": "worker", "index": 0}),
    ]:
        if task["index"] == 0 and found[1:]:
            del os.environ["KERASDIST_ALLOW_OPEN_SERVERS"]
        try:
            place(cluster={"cluster": cluster, "task": task})
        except kerasdist.errors.ClusterError as error:
            found.append(str(error))
    print("RESULT", json.dumps(found))
    """
    env = {"KERASDIST_SECRET": None}
    server, secret, task, word = Workers(script(text), 1, env=env).run()[0].result
    assert server.startswith("ModelParallelStrategy has no parameter servers.")
    assert secret.startswith("This job has no secret")
    assert "can't be used" in task
    assert word.startswith("ModelParallelStrategy on several workers makes TensorFlow")
    assert "run any program as you. Received: KERASDIST_ALLOW_OPEN_SERVERS=N" in word


def test_the_twelfth_task_is_not_taken_for_the_first():
    names = [f"/job:worker/replica:0/task:{task}" for task in range(14)]
    servers = [f"10.0.0.9:{port}" for port in (1, 123, *range(1230, 1242))]
    for rank in range(1, 14):
        assert named_in(f"{names[rank]}/device:CPU:0 is gone", names, servers) == rank
        assert named_in(f"ipv4:{servers[rank]}: refused", names, servers) == rank
    assert named_in("/job:worker/replica:0/task:0 is gone", names, servers) is None
