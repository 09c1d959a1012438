import json
import re
import signal

import numpy as np
import pytest
from elastic_jobs import elastic_script
from soak import soak

from workers import Workers

pytestmark = pytest.mark.timeout(300)

# Workers get the signal at the begin of a step; `taken` counts these begins, also of
# steps that are repeated.
SCRIPT = elastic_script("""
folder = sys.argv[1]
ends = json.loads(os.environ.get("ENDS", "{}"))
units = int(os.environ.get("UNITS", "16"))
kind = os.environ.get("KIND", "arrays")
# So that they leave before the end of `fit`, also on a fast machine.
from kerasdist._keras.elastic import joining
joining.POLL_SECONDS = 0.03
create = getattr(kerasdist, os.environ.get("STRATEGY", "RingStrategy"))
options = {}
if "several" in kind:
    logical_devices(2)
    options["devices"] = ["CPU:0", "CPU:1"]
strategy = create(elastic=True, timeout=60, startup_timeout=60, **options)
model = classifier(
    strategy, units=units, steps_per_execution=4 if "executions" in kind else 1
)

def generated():
    while True:
        yield from (Batches(32, x, y)[number] for number in range(8))

def pairs():
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    # Whose last batch has fewer rows than there are replicas.
    return untuned(rows.shuffle(250, seed=3).take(225).batch(32))

data = {
    "arrays": lambda: dict(x=x, y=y, batch_size=32),
    "several": lambda: dict(x=pairs()),
    "several executions": lambda: dict(x=pairs().repeat(), steps_per_epoch=8),
    "items": lambda: dict(x=Batches(32, x, y, workers=2), shuffle=True),
    "unknown": lambda: dict(x=pairs().filter(lambda a, b: tf.constant(True))),
    "generator": lambda: dict(x=generated(), steps_per_epoch=8),
}[kind]()

def ask():
    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 20
    while not signal.getsignal(signal.SIGTERM).requested and time.monotonic() < end:
        time.sleep(0.001)

class Asked(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.taken = self.checks = 0
        self.sizes = []

    def on_test_begin(self, logs=None):
        self.checks += 1
        if ends.get("check") == self.checks:
            ask()

    def on_train_batch_begin(self, batch, logs=None):
        self.taken += 1
        if ends.get(str(me)) == self.taken:
            ask()

    def on_train_batch_end(self, batch, logs=None):
        self.sizes.append(strategy.size)
        if not alone:
            time.sleep(0.01)

class Slower(keras.callbacks.LearningRateScheduler):
    def __init__(self):
        super().__init__(lambda epoch, rate: rate * 0.9)

if "AT_ONCE" in os.environ:
    ask()
earlier = model.fit(x, y, batch_size=64, epochs=1, verbose=0).history["loss"]
asked = Asked()
history = model.fit(
    **data, epochs=4, verbose=2 if strategy.rank == 0 else 0, callbacks=[
        asked,
        Slower(),
        keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=0.05),
        keras.callbacks.CSVLogger(folder + "/log.csv"),
    ],
    validation_data=(x[:50], y[:50]), validation_batch_size=10,
)
text = json.dumps([
    history.epoch,
    lists(history.history),
    whole(model),
    asked.sizes,
    [int(model.optimizer.iterations.numpy()), asked.taken],
    earlier,
])
os.write(1, f"RESULT {text}\\n".encode())
""")


class Job:
    """The script in a folder, whose next start is of the same one."""

    def __init__(self, folder):
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)

    def run(self, size, ends=None, servers=0, **env):
        variables = {
            "STRATEGY": "ParameterServerStrategy" if servers else "RingStrategy",
            "ENDS": json.dumps(ends or {}),
            "KERASDIST_CHECKPOINT_DIR": str(self.folder / "checkpoints"),
            **env,
        }
        arguments = [str(self.folder)]
        with Workers(
            self.script, size, arguments, variables, 120.0, servers=servers
        ) as job:
            return job.wait()

    @property
    def rows(self):
        return (self.folder / "log.csv").read_text()

    @property
    def checkpoints(self):
        return list((self.folder / "checkpoints").glob("*"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("alone"))
    (finished,) = job.run(1, TF_CONFIG=None)
    assert finished.returncode == 0, finished.output
    return finished.result, job.rows


def check(finished, alone, job):
    expected, rows = alone
    assert finished.returncode == 0, finished.output
    found = finished.result
    assert found[0] == expected[0]
    assert found[4] == expected[4]
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        np.testing.assert_allclose(
            found[1][name], values, rtol=1e-4, atol=1e-5, err_msg=name
        )
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[5], expected[5], rtol=1e-4, atol=1e-5)
    first = [row.split(",")[0] for row in rows.splitlines()]
    assert [row.split(",")[0] for row in job.rows.splitlines()] == first


@pytest.mark.soak
@pytest.mark.parametrize("ends", [{2: 5}, {0: 11, 2: 17}], ids=str)
def test_workers_leave_and_nothing_is_repeated(alone, tmp_path, ends):
    job = Job(tmp_path)
    finished = job.run(3, ends)
    codes = [-signal.SIGTERM if rank in ends else 0 for rank in range(3)]
    assert [each.returncode for each in finished] == codes
    output = "".join(each.output for each in finished)
    # In one line if they were asked in the same second.
    lines = re.findall(r"kerasdist: (.*) (?:was|were) preempted, and left at", output)
    ranks = re.findall(r"ranks? (\d+)", " ".join(lines))
    assert sorted(map(int, ranks)) == sorted(ends), output
    assert "lost" not in output
    left = [each for each in finished if each.rank not in ends]
    for each in left:
        check(each, alone, job)
        sizes = each.result[3]
        # Each step once, and most of them with fewer workers.
        assert len(sizes) == 32
        assert sizes == sorted(sizes, reverse=True)
        assert {3, 3 - len(ends)} <= set(sizes)
        assert each.result[2] == left[0].result[2]
    assert job.checkpoints == []


@pytest.mark.parametrize(
    ("before", "after", "servers"),
    [(1, 2, 0), soak(2, 3, 0), soak(2, 1, 0), soak(3, 2, 2)],
)
def test_the_next_start_continues_in_the_midst_of_the_epoch(
    alone, tmp_path, before, after, servers
):
    job = Job(tmp_path)
    first = job.run(before, dict.fromkeys(range(before), 13), servers)
    codes = before * [-signal.SIGTERM] + servers * [0]
    assert [each.returncode for each in first] == codes, first[-1].output
    (path,) = job.checkpoints
    assert "The next start of this script continues there, from" in first[0].output
    # A second time, in a later epoch.
    second = job.run(2, {0: 21, 1: 22}, servers)
    codes = 2 * [-signal.SIGTERM] + servers * [0]
    assert [each.returncode for each in second] == codes, second[0].output
    assert "`fit` continues after step" in second[0].output
    assert job.checkpoints == [path]
    third = job.run(after, servers=servers)
    assert [each.returncode for each in third[after:]] == servers * [0]
    for each in third[:after]:
        check(each, alone, job)
        assert each.result[2] == third[0].result[2]
    # With how many workers each step was taken.
    sizes = third[0].result[3]
    assert sizes[:12] == [before] * 12
    assert sizes[-1] == after
    assert len(sizes) == 32
    assert job.checkpoints == []


@pytest.mark.soak
@pytest.mark.parametrize(
    "kind", ["items", "several", "several executions", "unknown", "generator"]
)
def test_one_worker_continues_with_all_kinds_of_data(kind, tmp_path):
    (tmp_path / "alone").mkdir()
    alone = Job(tmp_path / "alone")
    expected = alone.run(1, KIND=kind)[0].result
    job = Job(tmp_path)
    # Before the first step; in an epoch; in the validation of one; in the last one.
    few = ({0: 4}, {"check": 4})
    # At the end of data, which only that call of Keras finds.
    end = ({0: 6},) if kind == "unknown" else ()
    many = ({0: 1}, few[0], *end, {"check": 2}, few[1])
    for ends in few if kind == "items" else many:
        (found,) = job.run(1, ends, KIND=kind)
        assert found.returncode == -signal.SIGTERM, found.output
        assert "The next start of this script continues there" in found.output
    (found,) = job.run(1, KIND=kind)
    check(found, (expected, alone.rows), job)
    if "several" not in kind:
        # The replicas' parts of metrics are added up in another order.
        assert found.result == expected
    assert job.checkpoints == []


def test_a_checkpoint_that_doesnt_fit_is_refused(tmp_path):
    job = Job(tmp_path)
    # Before the first step there is nothing to keep.
    (first,) = job.run(1, AT_ONCE="1")
    assert first.returncode == -signal.SIGTERM, first.output
    assert "begins from scratch: no step was taken" in first.output
    assert job.checkpoints == []
    (first,) = job.run(1, {0: 9})
    assert first.returncode == -signal.SIGTERM
    (path,) = job.checkpoints
    (other,) = job.run(1, UNITS="8")
    assert other.returncode == 1
    assert (
        "SnapshotError: The checkpoint of a preempted job can't be used. Received: "
        f"{path}: it is of a model with other variables."
    ) in other.output
    assert "or remove the file to begin from scratch" in other.output
    path.write_bytes(path.read_bytes()[:1000])
    (damaged,) = job.run(1)
    assert damaged.returncode == 1
    assert f"{path}: it can't be read" in damaged.output
