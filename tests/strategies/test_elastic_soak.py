"""One long `fit` whose workers are killed all the time, and started again.

SOAK_KILLS is the number of workers that are killed; a tenth as many are frozen.
"""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from elastic_jobs import elastic_script

from waiting import wait_until
from workers import Workers

KILLS = int(os.environ.get("SOAK_KILLS", "300"))
SIZE = 4
# Seconds until a worker takes part in steps after its start; and until the others have
# continued without a frozen one.
JOIN, FROZEN = 60.0, 30.0

SCRIPT = elastic_script("""
stop, epochs = sys.argv[1], int(sys.argv[2])
strategy = kerasdist.RingStrategy(elastic=True, startup_timeout=60)
with strategy.scope():
    keras.utils.set_random_seed(1)
    # Convex: rounding differs with the number of workers, and mustn't be amplified.
    model = keras.Sequential([
        keras.Input((8,)), keras.layers.Dense(3, activation="softmax")
    ])
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.5),
        "sparse_categorical_crossentropy",
        metrics=[keras.metrics.SparseCategoricalCrossentropy(name="bits")],
    )


# Not of the callback, whose numbers a newcomer gets.
begun = []


class Pace(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if not alone:
            time.sleep(0.01)

    def on_train_batch_end(self, batch, logs=None):
        if not begun:
            begun.append(True)
            print("MEMBER", flush=True)

    def on_epoch_end(self, epoch, logs=None):
        if os.path.exists(stop):
            self.model.stop_training = True


history = model.fit(
    x, y, batch_size=32, epochs=epochs, verbose=0,
    validation_data=(x[:50], y[:50]), callbacks=[Pace()],
)
print("RESULT", json.dumps([
    lists(history.history), whole(model), int(model.optimizer.iterations.numpy()),
]))
""")


class Losses:
    """Ends workers of a job at random moments, and starts them again."""

    def __init__(self, job, draw):
        self._job, self._draw = job, draw
        self._killed = set()
        self.counts = Counter()

    def members(self):
        """Return the ranks that have taken part in steps since their last start."""
        running = {rank for rank in range(SIZE) if self._job.is_running(rank)}
        return {
            rank
            for rank in running - self._killed
            if "MEMBER" in self._job.output(rank)
        }

    def start_again(self):
        """Start the workers again that were killed; no other may have ended."""
        for rank in range(SIZE):
            if not self._job.is_running(rank):
                code = self._job.wait_one(rank).returncode
                assert rank in self._killed, f"Rank {rank} has ended with {code}."
                self._killed.discard(rank)
                self._job.start_again(rank)

    def kill(self):
        ranks = self._draw.sample(range(SIZE), self._draw.choice([1, 1, 1, 2, 3]))
        for rank in ranks:
            if self.members() - {rank} and self._job.is_running(rank):
                self._job.kill(rank)
                self._killed.add(rank)
                time.sleep(self._draw.choice([0.0, 0.0, 0.05, 0.3]))
        self.counts["SIGKILL"] += len(self._killed)
        for rank in self._killed:
            self._job.wait_one(rank)

    def freeze(self):
        """Freeze one of all workers until the others have continued without it."""
        self.await_members()
        rank = self._draw.randrange(SIZE)
        before = self._changes()
        self._job.kill(rank, signal.SIGSTOP)
        self.counts["SIGSTOP"] += 1
        wait_until(lambda: self._changes() != before, f"all without {rank}", FROZEN)
        self._job.kill(rank, signal.SIGCONT)
        assert self._job.wait_one(rank, FROZEN).returncode != 0
        self._killed.add(rank)

    def _changes(self):
        return [self._job.output(rank).count("continue") for rank in range(SIZE)]

    def await_members(self):
        def all_train():
            self.start_again()
            return len(self.members()) == SIZE

        wait_until(all_train, "all members", JOIN)


@pytest.mark.soak
@pytest.mark.timeout(10 * KILLS + 600)
def test_a_long_fit(tmp_path):
    draw = random.Random(KILLS)
    stop = f"{tmp_path}/stop"
    with Workers(
        SCRIPT, SIZE, [stop, "1000000"], handover=False, deadline=10.0 * KILLS + 500
    ) as job:
        losses = Losses(job, draw)
        losses.await_members()
        counts = losses.counts
        while counts["SIGKILL"] < KILLS:
            if counts["SIGSTOP"] * 10 < counts["SIGKILL"]:
                losses.freeze()
            else:
                losses.kill()
            losses.start_again()
            if draw.random() < 0.5:
                losses.await_members()
            time.sleep(draw.choice([0.0, 0.1, 0.5, 1.0, 2.0]) * draw.random())
        losses.await_members()
        Path(stop).touch()
        found = [each.result for each in job.succeed()]
        print(job.report())
    history, weights, steps = found[0]
    print(dict(counts), "steps:", steps)
    assert all(each == found[0] for each in found)
    alone = [f"{tmp_path}/none", str(len(history["loss"]))]
    env = {"TF_CONFIG": None}
    (expected,) = Workers(SCRIPT, 1, alone, env=env, deadline=600.0).results()
    assert steps == expected[2]
    near = {"rtol": 1e-4, "atol": 1e-5}
    for name, values in expected[0].items():
        np.testing.assert_allclose(history[name], values, err_msg=name, **near)
    np.testing.assert_allclose(weights, expected[1], **near)
