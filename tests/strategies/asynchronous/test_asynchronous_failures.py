import signal

import pytest
from soak import soak

import asynchronous
from kerasdist.parameter_server.snapshots import path_of, read_snapshot
from waiting import wait_until

LOST = """
epochs = strategy.extended.kerasdist.hooks.dynamic
end_epoch = epochs.end_epoch
def dies(*args):
    logs = end_epoch(*args)
    # The others have met it, and its weights; they sum metrics without it.
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return logs
epochs.end_epoch = dies

class Lost(keras.callbacks.Callback):
    "The chief is lost in the midst of an epoch, rank 2 in an evaluation."
    def on_train_begin(self, logs=None):
        self.epoch, self.steps = 0, 0
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch, self.steps = epoch, 0
    def on_train_batch_begin(self, batch, logs=None):
        # The chief needs its steps.
        while rank and self.epoch == 1 and self.steps == 2:
            if any(event.rank == 0 for event in strategy.events):
                break
            time.sleep(0.01)
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if rank == 0 and self.epoch == 1 and self.steps == 2:
            os.kill(os.getpid(), getattr(signal, os.environ["FAULT"]))
    def on_test_batch_begin(self, batch, logs=None):
        if rank == 2 and batch == 4:
            os.kill(os.getpid(), signal.SIGKILL)

m = build()
digests = Digests()
history = m.fit(x, y, batch_size=10, epochs=3, verbose=0, callbacks=[digests, Lost()])
assert np.isfinite(history.history["loss"]).all()
evaluated = m.evaluate(x, y, batch_size=32, verbose=0, callbacks=[Lost()])
right = (m(x, training=False).numpy().argmax(1) == y).mean()
np.testing.assert_allclose(evaluated[1], right, rtol=1e-5)
# And they go on to train.
again = m.fit(x, y, batch_size=20, verbose=0)
result([digests.found, history.history, evaluated, again.history, digest(m)])
"""


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_the_others_go_on_without_a_lost_worker(fault):
    env = {"FAULT": fault, "HEARTBEAT": "3" if fault == "SIGSTOP" else "30"}
    with asynchronous.job(LOST, 5, env=env) as job:
        others = [job.wait_one(rank) for rank in (3, 4, 5)]
        job.kill(0, signal.SIGKILL)
    assert [task.returncode for task in others] == [0, 0, 0], others
    assert others[0].result == others[1].result
    assert len(others[0].result[0]) == 3
    for worker in others[:2]:
        for lost in range(3):
            assert f"rank {lost} ({job.addresses[lost]}) was lost" in worker.output


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
    x, y, batch_size=20, epochs=3, verbose=0, validation_data=(x[:77], y[:77]),
    callbacks=[say, digests])
result([say.batches, digests.found, history.history, m.evaluate(x, y, verbose=0)])
"""


def test_a_server_that_is_started_again_goes_on_from_its_snapshot(tmp_path):
    snapshots, folder = tmp_path / "snapshots", tmp_path / "folder"
    folder.mkdir()
    env = {"SNAPSHOTS": str(snapshots), "FOLDER": str(folder)}
    with asynchronous.job(RESTARTED, 2, env=env, handover=False) as job:
        job.wait_for_lines("training", 2)
        # Killed before it has written one with updates, it has lost them. A table's
        # first values are written at once; then the disk may be slow.
        path = path_of(str(snapshots), 0)
        wait_until(
            lambda: path.exists() and read_snapshot(path)[0]["updates"] > 0,
            "a snapshot with some updates",
        )
        job.kill(2)
        (folder / "killed").touch()
        job.wait_one(2)
        job.start_again(2)
        tasks = job.succeed()
    first, second = (task.result for task in tasks[:2])
    assert first[1:] == second[1:]
    for epoch in range(3):
        # Each batch once, also in the epoch in which the server has forgotten.
        assert sorted(first[0][epoch] + second[0][epoch]) == list(range(30))
    names = {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert set(first[2]) == names
    assert all(len(first[2][name]) == 3 for name in names)
    assert "continues from its snapshot" in tasks[2].output
    # The job has ended well: nobody will need them.
    assert list(snapshots.iterdir()) == []


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
if os.environ["DATA"] == "arrays":
    data, more = (x, y), {"batch_size": 20}
else:
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(600).batch(20),
    more = {}
say, digests = Say(), Digests()
history = m.fit(*data, **more, epochs=10_000, verbose=0, callbacks=[say, digests],
      validation_data=(x[:77], y[:77]))
rate = float(m.optimizer.learning_rate)
found = [digests.found[-4:], {k: v[-4:] for k, v in history.history.items()}, digest(m),
         m.evaluate(x, y, verbose=0), m.predict(x[:5], verbose=0).tolist(), rate]
result([found, sorted(say.batches.items())])
"""


@pytest.mark.parametrize(
    ("again", "data", "staleness"),
    [
        pytest.param([0], "dataset", "2", id="chief"),
        soak([2, 1], "arrays", "null", id="with_the_first_server"),
    ],
)
def test_a_new_process_joins_with_a_lost_workers_task(again, data, staleness, tmp_path):
    env = {"DATA": data, "STALENESS": staleness}
    if 2 in again:
        env["SNAPSHOTS"] = str(tmp_path)
    with asynchronous.job(JOINING, 2, servers=2, env=env, handover=False) as job:
        job.wait_for_lines("second epoch", 2)
        for task in again:
            job.kill(task)
        for task in again:
            job.wait_one(task)
        for task in again:
            job.start_again(task)
        tasks = job.succeed()[:2]
    found = [task.result[0] for task in tasks]
    assert found[0] == found[1]
    _, joined = tasks[again[-1]].result
    assert len(joined) == 4
    assert joined[0][0] >= 2
    assert sum(len(batches) for _, batches in joined) > 0
    every = [dict(task.result[1]) for task in tasks]
    for epoch, _ in joined:
        # The batches are dealt out to both, each to one.
        dealt = sorted(batch for each in every for batch in each[epoch])
        assert dealt == list(range(30))


@pytest.mark.soak
def test_who_joins_trains_in_fit_only(tmp_path):
    body = """
m = build()
if strategy.extended.workers.client.joined:
    # By itself: the others are busy.
    m.evaluate(x[:40], y[:40], verbose=0)
    result(refused(lambda: m.train_on_batch(x[:20], y[:20])))
    open(os.environ["FOLDER"] + "/refused", "w").close()
    sys.exit(0)
class Wait(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", flush=True)
        wait_for(os.environ["FOLDER"] + "/refused")
m.fit(x, y, batch_size=20, epochs=1, verbose=0, callbacks=[Wait()])
"""
    env = {"FOLDER": str(tmp_path)}
    with asynchronous.job(body, 2, env=env, handover=False) as job:
        job.wait_for_lines("epoch", 2)
        job.restart(1)
        tasks = job.succeed()
    assert "can join the job in `fit` only" in tasks[1].result
    assert "rank 1" in tasks[0].output
