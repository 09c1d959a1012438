"""One long `fit` whose workers are killed all the time, and started again.

SOAK_KILLS is the number of workers that are killed; a tenth as many are frozen.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from elastic_jobs import BEGIN, fail_on

from workers import Workers

KILLS = int(os.environ.get("SOAK_KILLS", "300"))
SIZE = 4
# Seconds until a worker takes part in steps after its start; and until the others have
# continued without a frozen one.
JOIN, FROZEN = 60.0, 30.0

SCRIPT = (
    BEGIN
    + """
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
"""
)


class Losses:
    """Ends workers of a job at random moments, and starts them again."""

    def __init__(self, job: Workers, draw: random.Random) -> None:
        self._job = job
        self._draw = draw
        self._killed: set[int] = set()
        self.counts: Counter[str] = Counter()

    def members(self) -> set[int]:
        """Return the ranks that have taken part in steps since their last start."""
        return {rank for rank in range(SIZE) if self._takes_part(rank)}

    def _takes_part(self, rank: int) -> bool:
        running = rank not in self._killed and self._job.is_running(rank)
        return running and "MEMBER" in self._job.output(rank)

    def start_again(self) -> None:
        """Start the workers again that were killed; no other may have ended."""
        for rank in range(SIZE):
            if self._job.is_running(rank):
                continue
            code = self._job.wait_one(rank).returncode
            if rank not in self._killed:
                self._fail(f"Rank {rank} has ended with {code}.")
            self._killed.discard(rank)
            self._job.start_again(rank)

    def kill(self) -> None:
        """Kill one worker or several, so that a member remains."""
        ranks = self._draw.sample(range(SIZE), self._draw.choice([1, 1, 1, 2, 3]))
        for rank in ranks:
            if self.members() - {rank} and self._job.is_running(rank):
                self.counts["joining" if rank not in self.members() else "member"] += 1
                self._job.kill(rank)
                self._killed.add(rank)
                time.sleep(self._draw.choice([0.0, 0.0, 0.05, 0.3]))
        self.counts["SIGKILL"] += len(self._killed)
        for rank in self._killed:
            self._job.wait_one(rank)

    def freeze(self) -> None:
        """Freeze one of all workers until the others have continued without it."""
        self.await_members()
        rank = self._draw.randrange(SIZE)
        before = {each: self._lines(each) for each in range(SIZE)}
        self._job.kill(rank, signal.SIGSTOP)
        self.counts["SIGSTOP"] += 1
        end = time.monotonic() + FROZEN
        while all(self._lines(each) == before[each] for each in range(SIZE)):
            if time.monotonic() > end:
                self._fail(f"Rank {rank} is frozen.")
            time.sleep(0.1)
        self._job.kill(rank, signal.SIGCONT)
        if self._job.wait_one(rank, FROZEN).returncode == 0:
            self._fail(f"Rank {rank} has finished.")
        self._killed.add(rank)

    def _fail(self, reason: str) -> None:
        """Fail the test, with the stacks of all workers in their output."""
        for rank in range(SIZE):
            self._job.kill(rank, signal.SIGABRT)
        time.sleep(2.0)
        pytest.fail(f"{reason}\n{self._job.report()}")

    def _lines(self, rank: int) -> int:
        """Return how many changes a worker has reported, as the chief."""
        return self._job.output(rank).count("continue")

    def await_members(self) -> None:
        """Wait until all workers take part in steps."""
        end = time.monotonic() + JOIN
        while len(self.members()) < SIZE:
            self.start_again()
            if time.monotonic() > end:
                self._fail(f"Only {self.members()} train.")
            time.sleep(0.05)


@pytest.mark.soak
@pytest.mark.timeout(10 * KILLS + 600)
def test_a_long_fit(tmp_path: Path) -> None:
    draw = random.Random(KILLS)
    stop = f"{tmp_path}/stop"
    began = time.monotonic()
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
        finished = job.succeed()
        found = [each.result for each in finished]
        logs = [f"{each.rank}: {each.output[-3000:]}" for each in finished]
    history, weights, steps = found[0]
    print(dict(counts), "steps:", steps, f"{time.monotonic() - began:.0f} s")
    assert all(each == found[0] for each in found)
    alone = [f"{tmp_path}/none", str(len(history["loss"]))]
    with Workers(SCRIPT, 1, alone, env={"TF_CONFIG": None}, deadline=600.0) as job:
        expected = job.succeed()[0].result
    faults = [] if steps == expected[2] else [f"{steps} steps, not {expected[2]}"]
    faults += [
        f"{name}: {error}"
        for name, values in expected[0].items()
        for error in _differences(history[name], values)
    ]
    faults += _differences(weights, expected[1])
    fail_on([*faults, *logs] if faults else [])


def _differences(found: list[float], expected: list[float]) -> list[str]:
    try:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    except AssertionError as error:
        return [" ".join(str(error).split())[:300]]
    return []
