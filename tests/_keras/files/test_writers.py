"""The chief writes; the others return when it has written, and wait for nothing else.

A rank that waited in vain would wait for `timeout`: 60 s in these jobs, which is more
than the tests have.
"""

import zipfile

import keras
import numpy as np
import pytest
from scripts import with_prelude
from soak import soak

from sessions import Session
from workers import Workers

SETUP = with_prelude("""
import tempfile
from keras.models import load_model, save_model  # before there is a strategy

MODE = os.environ.get("MODE", "ring")
if MODE == "ring":
    strategy = kerasdist.RingStrategy(timeout=60)
else:
    strategy = kerasdist.ParameterServerStrategy(MODE, timeout=60)
rank = strategy.rank
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = (x.sum(1) > 0).astype("int64")

def build(units=8):
    with strategy.scope():
        m = keras.Sequential([
            keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(2)])
        m.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return m

def fit(m, callbacks=(), **more):
    return m.fit(x, y, batch_size=16, callbacks=list(callbacks), **{
        "epochs": 2, "verbose": 0, **more})

def total(m):
    return float(sum(np.abs(w).sum() for w in m.get_weights()))
""")

BEFORE = """
os.chdir(os.environ["FOLDER"])
keras.utils.set_random_seed(3)
report = {}
"""
SCRIPT = SETUP + BEFORE


@pytest.fixture(scope="module")
def ring():
    with Session(SETUP, 2, before=BEFORE, env={"MODE": "ring"}, deadline=140) as made:
        yield made


# Orbax itself, which brings JAX, isn't installed for the tests: what is handed to it is
# kept.
ORBAX = """
from unittest import mock
from keras.src.callbacks import orbax_checkpoint

with mock.patch.object(orbax_checkpoint, "ocp", mock.MagicMock()) as orbax:
    writer = orbax.training.Checkpointer.return_value
    m = build()
    callback = keras.callbacks.OrbaxCheckpoint(
        "orbax", monitor="loss", save_on_background=False)
    loss = fit(m, [callback]).history["loss"][-1]
saved = [call.args[1]["pytree"] for call in writer.save_checkpointables.call_args_list]
report["orbax"] = [
    [tree["metrics_variables"]["loss"]["count"] for tree in saved],
    sum(tree["metrics_variables"]["loss"]["total"] for tree in saved[-1:]) / 64 - loss]
"""

# All that holds in each mode, one after the other in one job.
LOADED = """
m = build(units=20_000)
found = []
weights = total(m)
m.save("a.keras")
found.append(total(load_model("a.keras")))
m.save_weights("a.weights.h5")
m.load_weights("a.weights.h5")
save_model(m, "c.h5")
found.append(total(load_model("c.h5")))
keras.saving.save_weights(m, "b.weights.h5")
keras.saving.load_weights(m, "b.weights.h5")
m.export("served", verbose=False)
served = tf.saved_model.load("served")
for number in range(2):  # the same file again and again
    m.save("again.keras")
    load_model("again.keras")
    fit(m, epochs=1)
part = keras.Model(m.inputs, m.layers[0].output)
part.save("part.keras")
found.append(total(load_model("part.keras")) > 0)
own = f"{rank}.weights.h5"
part.save_weights(own)
plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
plain.save("plain.keras")
found.append(total(load_model("plain.keras")) > 0)
space = keras.utils.FeatureSpace({"a": keras.utils.FeatureSpace.float()})
space.save("space.keras")
found.append(load_model("space.keras").get_config()["features"] is not None)
report["loaded"] = [weights, found, served.serve(x).shape[1]]
"""

CHECKPOINTS = """
checkpoint = tf.train.Checkpoint(model=m, optimizer=m.optimizer)
manager = tf.train.CheckpointManager(checkpoint, "kept", max_to_keep=2)
fit(m, epochs=1)  # all have made it: one that finds files of the chief removes them
paths = [manager.save() for _ in range(3)]
weights = total(m)
fit(m, epochs=1)
checkpoint.restore(manager.latest_checkpoint)
restored = total(m) == weights
mine = tempfile.mkdtemp(dir=".")
with strategy.scope():
    checkpoint.save(mine + "/c")
latest = os.path.basename(tf.train.latest_checkpoint(mine))
report["checkpoints"] = [paths, restored, latest, sorted(os.listdir("kept"))]
"""

ANYBODY = """
fit(m, epochs=1)
if strategy.is_chief:
    m.save("chief.keras")
fit(m, epochs=1)
if rank == 1:
    m.save("other.keras")  # its own
    m.save("chief.keras")  # stays the chief's
fit(m, epochs=1)
m.save(f"{rank}.keras")  # each rank another one
fit(m, epochs=1)
# As in TensorFlow's tutorial for several workers, where all must write.
own = f"own-{rank}/x"
checkpoint = tf.train.Checkpoint(model=build())
tf.train.CheckpointManager(checkpoint, own, max_to_keep=1).save()
kept = tf.train.latest_checkpoint(own)
tf.io.gfile.rmtree(own)
fit(m, epochs=1)
mine = tempfile.mkdtemp(dir=".")  # another one on each rank
m.save(mine + "/m.keras")
m.export(mine + "/served", verbose=False)
temporary = total(load_model(mine + "/m.keras")) > 0
temporary = temporary and tf.saved_model.load(mine + "/served") is not None
m.save("all.keras")
report["anybody"] = [
    temporary,
    total(m) == total(load_model("all.keras")),
    sorted(name for name in os.listdir(".") if name[0] in "01co"),
    kept,
    total(load_model("other.keras")) > 0,
    error_of(lambda: load_model("chief.keras"))]
"""

# Every rank has its own folder here: so it shows who wrote.
SCOPED = """
mine = f"scoped-{rank}"
os.makedirs(mine)
with strategy.scope():
    m = build()
    history = fit(m, [
        keras.callbacks.ModelCheckpoint(mine + "/best.keras", save_best_only=True),
        keras.callbacks.ModelCheckpoint(
            mine + "/{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.BackupAndRestore(mine + "/backup", delete_checkpoint=False),
        keras.callbacks.TensorBoard(mine + "/board", histogram_freq=1),
        keras.callbacks.CSVLogger(mine + "/log.csv"),
    ], validation_data=(x, y)).history
    if strategy.is_chief:
        m.export(mine + "/exported", verbose=False)
        m.save(mine + "/alone.keras")
    m.save("all.keras")
    again = load_model("all.keras")
    steps = [int(m.optimizer.iterations), int(again.optimizer.iterations)]
    fit(again)
again.save("again.keras")
again.save(mine + "/own.keras")
report["scoped"] = [
    history, [*steps, int(again.optimizer.iterations)], total(again),
    total(load_model("again.keras")),
    again.predict(x, verbose=0).tolist()]
report["mine"] = sorted(os.listdir(mine))
result(report)
"""


@pytest.fixture(scope="module", params=["ring", soak("async")])
def job(request, ring, tmp_path_factory):
    """What both workers have found, the output of the second, and the folder."""
    mode, body = request.param, LOADED + CHECKPOINTS + ANYBODY + ORBAX + SCOPED
    folder = tmp_path_factory.mktemp(mode)
    if mode == "ring":
        first, second = ring.finish(body, FOLDER=str(folder))
    else:
        env = {"FOLDER": str(folder), "MODE": mode}
        job = Workers(SCRIPT + body, 2, env=env, deadline=140, servers=1)
        first, second = job.run()[:2]
    return first.result, second.result, second.output, folder


def test_what_is_saved_can_be_loaded_in_the_next_line(job):
    """Other ranks found no file, or half of one: they came before the chief.

    The model is large, so that saving takes a while. A submodel that is made outside of
    the scope was written by all ranks at once, as anything else that is no strategy's.
    """
    first, second, *_ = job
    assert first["loaded"] == second["loaded"]
    weights, found, served = first["loaded"]
    assert found == [weights] * 2 + [True] * 3
    assert served == 2


def test_checkpoints_of_tensorflow_are_written_once(job):
    """All ranks wrote into one folder, which one removed while another needed it."""
    first, second, *_ = job
    assert first["checkpoints"] == second["checkpoints"]
    paths, restored, latest, files = first["checkpoints"]
    assert paths == [f"kept/ckpt-{i}" for i in (1, 2, 3)]
    assert (restored, latest) == (True, "c-4")
    parts = ("data-00000-of-00001", "index")
    kept = [f"ckpt-{i}.{part}" for i in (2, 3) for part in parts]
    assert files == ["checkpoint", *kept]


def test_it_does_not_matter_who_saves(job):
    """A barrier in `save` would hang here, or meet what the others do next."""
    first, second, output, _ = job
    temporary, right, files, kept, other, fault = first["anybody"]
    assert (temporary, right, kept, other) == (True, True, "own-0/x/ckpt-1", True)
    assert fault is None
    rest = "c.h5 chief.keras other.keras own-0 own-1"
    own = ["0.keras", "0.weights.h5", "1.keras", "1.weights.h5"]
    assert files == [*own, *rest.split()]
    temporary, right, _, kept, other, (kind, text) = second["anybody"]
    assert (temporary, right, kept, other) == (True, True, "own-1/x/ckpt-1", True)
    assert kind == "ValueError"
    assert "Rank 1 was asked to write a file, which only the chief does" in text
    assert output.count("kerasdist: Rank 1 was asked to write a file") == 1


def test_saved_metrics_are_those_of_all_workers(job):
    """`OrbaxCheckpoint` reads them: a collective that only the chief took part in."""
    first, second, *_ = job
    counts, difference = first["orbax"]
    assert counts == [64, 64]
    assert difference == pytest.approx(0, abs=1e-6)
    assert second["orbax"][0] == []


def test_the_chief_writes_in_the_scope(job):
    """Saving makes variables, and in the scope these were collectives of the chief's.

    keras.io's guide to distributed training calls `fit` in the scope, with a
    `ModelCheckpoint`.
    """
    first, second, _, folder = job
    if folder.name.startswith("async"):  # each counts its own steps; a file the chief's
        second["scoped"][1] = first["scoped"][1]
    assert first["scoped"] == second["scoped"]
    _, steps, weights, loaded, predicted = first["scoped"]
    assert weights == loaded
    assert 0 < steps[0] == steps[1] < steps[2]  # it goes on with its optimizer
    # What a rank saves itself, to a path that isn't the chief's, and of callbacks none.
    assert second["mine"] == ["own.keras"]
    models = "1.weights.h5 2.weights.h5 alone.keras backup best.keras board exported"
    assert first["mine"] == [*models.split(), "log.csv", "own.keras"]
    # The file loads in a process without a strategy, and needs no kerasdist.
    with zipfile.ZipFile(folder / "again.keras") as file:
        assert b"kerasdist" not in file.read("config.json")
    model = keras.models.load_model(folder / "again.keras")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    np.testing.assert_allclose(model.predict(x, verbose=0), predicted, rtol=1e-4)


def test_all_get_the_error_of_the_chief(ring, tmp_path):
    """The others would have gone on, to wait in the next collective."""
    body = """
class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)

class Broken(keras.layers.Layer):
    def get_config(self):
        raise Odd("no", "config")

m = build()
with strategy.scope():
    broken = keras.Sequential([keras.Input((4,)), Broken(), keras.layers.Dense(1)])
found = [
    error_of(lambda: m.save_weights("there/is/none.weights.h5")),
    error_of(lambda: m.save("odd.ending")),
    error_of(lambda: broken.save("broken.keras")),
]
m.save("whole.keras")
load_model("whole.keras")
strategy.communicator.barrier()
result(found)
"""
    first, second = ring.run(body, FOLDER=str(tmp_path))
    kinds = ["FileNotFoundError", "ValueError"]
    assert [kind for kind, _ in first] == [*kinds, "Odd"]
    assert [kind for kind, _ in second] == [*kinds, "RuntimeError"]
    assert all("(the chief, rank 0, was writing " in text for _, text in second)
    assert second[2][1].startswith("Odd: ('no', 'config')")


def test_a_chief_that_dies_while_it_writes_is_lost(tmp_path):
    body = """
class Deadly(keras.layers.Layer):
    def get_config(self):
        os._exit(3)

with strategy.scope():
    m = keras.Sequential([keras.Input((4,)), Deadly(), keras.layers.Dense(1)])
result(error_of(lambda: m.save("m.keras")))
"""
    env = {"FOLDER": str(tmp_path)}
    with Workers(SCRIPT + body, 2, env=env, deadline=100) as job:
        _, second = job.wait()
    assert second.result[0] == "WorkerLost"
    assert second.result[1].startswith("Rank 0 (")


def test_without_a_shared_file_system_it_is_said(ring, tmp_path):
    """Each rank has a folder of its own, as on hosts that share none."""
    body = """
m = build()
os.makedirs(str(rank))
os.chdir(str(rank))
if rank == 1:
    with open("old.keras", "w") as file:
        file.write("of an earlier run")
    os.utime("old.keras", (1, 1))
m.save("old.keras")
m.save("new.keras")
m.save("given.keras")
strategy.communicator.barrier()
if rank == 1:  # brings it by itself
    with open("../0/given.keras", "rb") as theirs, open("given.keras", "wb") as mine:
        mine.write(theirs.read())
names = ("old.keras", "new.keras", "given.keras")
result([error_of(lambda: keras.models.load_model(name)) for name in names])
"""
    first, second = ring.finish(body, FOLDER=str(tmp_path))
    assert first.result == [None] * 3
    (old, older), (new, absent), given = second.result
    assert (old, new, given) == ("ValueError", "ValueError", None)
    assert "on this host the file is another, older one" in older
    assert "on this host the file isn't there" in absent
    assert str(tmp_path / "0" / "new.keras") in absent
    warnings = [line for line in second.output.splitlines() if "kerasdist: The" in line]
    assert len(warnings) == 1


@pytest.mark.soak
def test_a_lost_chief_writes_nothing_and_nobody_waits_for_it(tmp_path):
    body = """
m = build()
fit(m)
if rank == 0:
    os._exit(9)
while not any(event.kind == "lost" for event in strategy.events):
    time.sleep(0.01)
m.save("m.keras")
fit(m)
result([os.listdir("."), total(m) > 0])
"""
    env = {"FOLDER": str(tmp_path), "MODE": "async"}
    with Workers(SCRIPT + body, 2, env=env, deadline=100, servers=1) as job:
        chief, other = job.wait()[:2]
    assert other.result == [[], True]
    assert "the chief can't write it any more" in other.output
    assert chief.returncode == 9
