from pathlib import Path

from scripts import with_prelude

from workers import Workers

SCRIPT = with_prelude("""
import itertools

strategy = kerasdist.RingStrategy()
way = sys.argv[1]

def generate():
    for i in itertools.count():
        # The thread that reads is always in here, and needs the lock to leave it.
        if way == "caught":
            time.sleep(0.2)
        # The first worker's stays here when its `fit` fails, until the other knows.
        elif strategy.is_chief and i == 4:
            end = time.monotonic() + 100
            while not os.path.exists(way) and time.monotonic() < end:
                time.sleep(0.01)
        yield [1.0], [1.0]

class Fault(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if strategy.is_chief:
            error = ValueError("made")
            self.frame = sys._getframe()  # a cycle
            raise error

spec = tf.TensorSpec((1,))
data = tf.data.Dataset.from_generator(generate, output_signature=(spec, spec))
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
try:
    model.fit(data.batch(2).prefetch(4), steps_per_epoch=100, callbacks=[Fault()])
except kerasdist.errors.KerasDistError:
    open(way, "w").close()
    print("INFORMED", flush=True)
except ValueError:
    if way == "caught":
        sys.exit(3)
    raise
""")


def test_others_are_informed_before_a_process_waits_for_threads(tmp_path: Path) -> None:
    with Workers(SCRIPT, 2, [str(tmp_path / "informed")], deadline=60) as job:
        # It would wait for the generator, which waits for the other worker.
        assert "INFORMED" in job.wait_one(1).output
        first = job.wait_one(0)
    assert (first.returncode, "ValueError: made" in first.output) == (1, True)


def test_a_process_ends_after_an_error_that_was_caught() -> None:
    with Workers(SCRIPT, 1, ["caught"], deadline=60) as job:
        (finished,) = job.wait()
    assert finished.returncode == 3, finished.output
