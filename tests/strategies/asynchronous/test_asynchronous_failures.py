"""Workers and servers of ParameterServerStrategy(mode="async") are lost, and return."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
from soak import soak

import asynchronous
from kerasdist.parameter_server.snapshots import path_of, read_snapshot
from pace import bound
from waiting import wait_until

pytestmark = pytest.mark.timeout(150)


def wait_for_snapshot(folder):
    """Until server 0 has written one with updates; killed before, it has lost them.

    A table's first values are written at once; then the disk may be slow.
    """
    path = path_of(str(folder), 0)
    wait_until(
        lambda: path.exists() and read_snapshot(path)[0]["updates"] > 0,
        "a snapshot with some updates",
    )


LONG = """
class Say(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 20:
            print("training", flush=True)
        if os.path.exists(os.environ["FOLDER"] + "/killed"):
            self.after = getattr(self, "after", 0) + 1
            self.model.stop_training = self.after > 30

m = build()
try:
    m.fit(x, y, batch_size=20, epochs=100_000, verbose=0, callbacks=[Say()])
except kerasdist.errors.CollectiveError as error:
    result([type(error).__name__, str(error), time.time()])
    sys.exit(7)
predicted = m.predict(x[:101], batch_size=32, verbose=0)
np.testing.assert_allclose(
    predicted, m(x[:101], training=False).numpy(), rtol=1e-4, atol=1e-4)
evaluated = m.evaluate(x, y, batch_size=32, verbose=0)
np.testing.assert_allclose(
    evaluated[1], (m(x, training=False).numpy().argmax(1) == y).mean(), rtol=1e-5)
result([digest(m), evaluated])
"""


@pytest.mark.parametrize(
    ("lost", "fault"),
    [
        soak(2, signal.SIGKILL, id="killed"),
        pytest.param(0, signal.SIGKILL, id="chief_killed"),
        soak(1, signal.SIGSTOP, id="frozen"),
    ],
)
def test_the_others_go_on_without_a_lost_worker(lost, fault, tmp_path):
    heartbeat = "3" if fault == signal.SIGSTOP else "30"
    env = {"FOLDER": str(tmp_path), "HEARTBEAT": heartbeat}
    with asynchronous.job(LONG, 3, env=env) as job:
        for rank in range(3):
            job.wait_for_line(rank, "training")
        job.kill(lost, fault)
        (tmp_path / "killed").touch()
        others = [job.wait_one(rank) for rank in range(4) if rank != lost]
        job.kill(lost, signal.SIGKILL)
    assert [task.returncode for task in others] == [0, 0, 0], others
    assert others[0].result == others[1].result
    for worker in others[:2]:
        assert f"rank {lost} ({job.addresses[lost]}) was lost" in worker.output


@pytest.mark.parametrize("staleness", [soak("null"), "0"])
def test_a_lost_server_is_named_in_time(staleness, tmp_path):
    env = {"FOLDER": str(tmp_path), "STALENESS": staleness}
    with asynchronous.job(LONG, 2, servers=2, env=env) as job:
        for rank in range(2):
            job.wait_for_line(rank, "training")
        at = time.time()
        job.kill(3)
        workers = [job.wait_one(rank) for rank in range(2)]
    for worker in workers:
        kind, message, seen = worker.result
        assert kind == "ServerLost", worker.output
        assert f"Server 1 ({job.addresses[3]}) was lost" in message
        assert seen - at < bound(20)


RESTARTED = """
class Say(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches = []
    def on_epoch_begin(self, epoch, logs=None):
        self.batches.append([])
    def on_train_batch_begin(self, batch, logs=None):
        self.batches[-1].append(batch)
        if len(self.batches) == 2 and batch > 8:
            # Claimed before the server is lost, trained on afterwards.
            print("training", flush=True)
            wait_for(os.environ["FOLDER"] + "/killed")

m = build()
say, digests = Say(), Digests()
history = m.fit(
    x, y, batch_size=20, epochs=5, verbose=0, validation_data=(x[:77], y[:77]),
    callbacks=[say, digests])
result([say.batches, digests.found, history.history, m.evaluate(x, y, verbose=0)])
"""


@pytest.mark.parametrize("servers", [1, soak(2)])
def test_a_server_that_is_started_again_goes_on_from_its_snapshot(servers, tmp_path):
    snapshots, folder = tmp_path / "snapshots", tmp_path / "folder"
    folder.mkdir()
    env = {"SNAPSHOTS": str(snapshots), "FOLDER": str(folder)}
    with asynchronous.job(
        RESTARTED, 2, servers=servers, env=env, handover=False
    ) as job:
        for rank in range(2):
            job.wait_for_line(rank, "training")
        # The one that deals out the batches.
        wait_for_snapshot(snapshots)
        job.kill(2)
        (folder / "killed").touch()
        job.wait_one(2)
        job.start_again(2)
        tasks = job.succeed()
    first, second = (task.result for task in tasks[:2])
    assert first[1:] == second[1:]
    for epoch in range(5):
        # Each batch once, also in the epoch in which the server has forgotten.
        assert sorted(first[0][epoch] + second[0][epoch]) == list(range(30))
    names = {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert set(first[2]) == names
    assert all(len(first[2][name]) == 5 for name in names)
    assert "continues from its snapshot" in tasks[2].output
    # The job has ended well: nobody will need them.
    assert list(snapshots.iterdir()) == []


BEGUN_AGAIN = """
class Begin(keras.callbacks.Callback):
    found = None
    def on_epoch_begin(self, epoch, logs=None):
        self.found = self.found or [digest(self.model), fresh]
    def on_train_batch_end(self, batch, logs=None):
        again = self.found[0] != fresh
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 60:
            print("training", flush=True)
        self.model.stop_training = again and self.steps > 10

m = build()
fresh, begin = digest(m), Begin()
m.fit(x, y, batch_size=20, epochs=10_000, verbose=0, callbacks=[begin])
result([begin.found, digest(m)])
"""


@pytest.mark.soak
def test_a_job_whose_tasks_were_all_killed_begins_with_its_snapshots(tmp_path):
    env = {"SNAPSHOTS": str(tmp_path)}
    with asynchronous.job(BEGUN_AGAIN, 2, env=env, handover=False) as job:
        for rank in range(2):
            job.wait_for_line(rank, "training")
        wait_for_snapshot(tmp_path)
        for task in range(3):
            job.kill(task)
        for task in range(3):
            job.wait_one(task)
        for task in range(3):
            job.start_again(task)
        first, second = (task.result for task in job.succeed()[:2])
    assert first == second
    (learned, fresh), _ = first
    assert learned != fresh


EVALUATING = """
class Say(keras.callbacks.Callback):
    def say(self, batch, logs=None):
        if batch == 4:
            print(os.environ["DO"], flush=True)
            wait_for(os.environ["FOLDER"] + "/killed")
    on_test_batch_begin = on_predict_batch_begin = say

m = build()
m.fit(x, y, batch_size=20, epochs=1, verbose=0)
if os.environ["DO"] == "evaluate":
    found = m.evaluate(x, y, batch_size=32, verbose=0, callbacks=[Say()])
    right = (m(x, training=False).numpy().argmax(1) == y).mean()
    np.testing.assert_allclose(found[1], right, rtol=1e-5)
else:
    found = m.predict(x, batch_size=32, verbose=0, callbacks=[Say()])
    np.testing.assert_allclose(
        found, m(x, training=False).numpy(), rtol=1e-4, atol=1e-4)
    found = found.tolist()
# And they go on to train.
history = m.fit(x, y, batch_size=20, epochs=2, verbose=0)
result([found, history.history, digest(m)])
"""


@pytest.mark.parametrize("do", ["evaluate", soak("predict")])
def test_a_worker_is_lost_while_the_others_evaluate(do, tmp_path):
    env = {"DO": do, "FOLDER": str(tmp_path)}
    with asynchronous.job(EVALUATING, 3, env=env) as job:
        for rank in range(3):
            job.wait_for_line(rank, do)
        job.kill(2)
        (tmp_path / "killed").touch()
        others = [job.wait_one(rank) for rank in (0, 1, 3)]
    assert [task.returncode for task in others] == [0, 0, 0], others
    assert others[0].result == others[1].result


def test_a_worker_is_lost_with_its_last_metrics():
    body = """
epochs = strategy.extended.kerasdist.hooks.dynamic
end_epoch = epochs.end_epoch
def dies(*args):
    logs = end_epoch(*args)
    # The others have met it, and its weights; they sum metrics without it.
    if rank == 1:
        os.kill(os.getpid(), 9)
    return logs
epochs.end_epoch = dies

m = build()
digests = Digests()
history = m.fit(x, y, batch_size=20, epochs=3, verbose=0, callbacks=[digests])
result([digests.found, history.history])
"""
    with asynchronous.job(body, 3) as job:
        others = [job.wait_one(rank) for rank in (0, 2, 3)]
    assert [task.returncode for task in others] == [0, 0, 0], others
    assert others[0].result == others[1].result
    found, history = others[0].result
    assert len(found) == 3
    assert np.isfinite(history["loss"]).all()


# Joining.

JOINING = """
client = strategy.extended.workers.client
# `fit` ends a few epochs after the new process has joined.
class Say(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches = {}
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.batches[epoch] = []
    def on_train_batch_begin(self, batch, logs=None):
        self.batches[self.epoch].append(batch)
        time.sleep(0.01)  # the new process needs the cores: it begins with its imports
        if self.epoch == 1:
            print("second epoch", flush=True)
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = client.joined and len(self.batches) == 4

m = build(lambda: keras.optimizers.Adam(
    keras.optimizers.schedules.ExponentialDecay(0.01, 1000, 0.9)))
if os.environ["DATA"] != "dataset":
    data, more = (x, y), {"batch_size": 20}
else:
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(600).batch(20),
    more = {}
if os.environ["DATA"] == "parts":
    more["steps_per_epoch"] = 7
say, digests = Say(), Digests()
history = m.fit(*data, **more, epochs=10_000, verbose=0, callbacks=[say, digests],
      validation_data=(x[:77], y[:77]))
rate = float(m.optimizer.learning_rate)
found = [digests.found[-4:], {k: v[-4:] for k, v in history.history.items()}, digest(m),
         m.evaluate(x, y, verbose=0), m.predict(x[:5], verbose=0).tolist(), rate]
result([found, sorted(say.batches.items())])
"""


@pytest.mark.parametrize(
    ("lost", "servers", "data", "staleness", "server_too"),
    [
        soak(1, 1, "arrays", "null", False, id="last"),
        pytest.param(0, 2, "dataset", "2", False, id="chief"),
        soak(1, 1, "parts", "null", False, id="within_a_pass"),
        soak(1, 2, "arrays", "null", True, id="with_the_first_server"),
    ],
)
def test_a_new_process_joins_with_a_lost_workers_task(
    lost, servers, data, staleness, server_too, tmp_path
):
    env = {"DATA": data, "STALENESS": staleness}
    if server_too:
        env["SNAPSHOTS"] = str(tmp_path)
    with asynchronous.job(JOINING, 2, servers=servers, env=env, handover=False) as job:
        for rank in range(2):
            job.wait_for_line(rank, "second epoch")
        again = [2, lost] if server_too else [lost]
        for task in again:
            job.kill(task)
        for task in again:
            job.wait_one(task)
        for task in again:
            job.start_again(task)
        tasks = job.succeed()[:2]
    found = [task.result[0] for task in tasks]
    assert found[0] == found[1]
    joined = tasks[lost].result[1]
    assert len(joined) == 4
    assert joined[0][0] >= 2
    assert sum(len(batches) for _, batches in joined) > 0
    every = [dict(task.result[1]) for task in tasks]
    for epoch, _ in joined:
        # The batches are dealt out to both, each to one.
        dealt = sorted(batch for each in every for batch in each[epoch])
        assert dealt == list(range(30 if data != "parts" else len(dealt)))


def test_who_joins_trains_in_fit_only(tmp_path):
    body = """
m = build()
if strategy.extended.workers.client.joined:
    # By itself: the others are busy.
    before = m.evaluate(x[:40], y[:40], verbose=0)
    try:
        m.train_on_batch(x[:20], y[:20])
    except RuntimeError as error:
        result([len(before), str(error)])
    open(os.environ["FOLDER"] + "/refused", "w").close()
    sys.exit(0)
class Wait(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", flush=True)
        wait_for(os.environ["FOLDER"] + "/refused")
m.fit(x, y, batch_size=20, epochs=1, verbose=0, callbacks=[Wait()])
result(digest(m))
"""
    env = {"FOLDER": str(tmp_path)}
    with asynchronous.job(body, 2, env=env, handover=False) as job:
        for rank in range(2):
            job.wait_for_line(rank, "epoch")
        job.kill(1)
        job.wait_one(1)
        job.start_again(1)
        tasks = job.succeed()
    metrics, message = tasks[1].result
    assert metrics == 2
    assert "can join the job in `fit` only" in message
    assert "rank 1" in tasks[0].output
