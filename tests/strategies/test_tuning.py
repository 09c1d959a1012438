"""Tuned communication: the model of a step, what is tried, and real training."""

import functools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import with_prelude
from soak import soak

import kerasdist
from groups import Group, addresses_of, cluster_on, in_threads, nothing_stays_open
from kerasdist.collectives import connect
from kerasdist.collectives.checked import CheckedCommunicator
from kerasdist.collectives.ring import HierarchicalCommunicator, RingCommunicator
from kerasdist.prediction.profile import HostLink
from kerasdist.strategies import tuning
from kerasdist.strategies.tuning import predicted_step, search
from kerasdist.transport.array_file import write_arrays
from workers import Workers

GIVEN = tuning.Choice(25_000_000, None)
MODELS = st.lists(st.integers(1_000, 40_000_000), min_size=1, max_size=30)
LINKS = st.builds(HostLink, st.floats(1e-5, 1e-2), st.floats(1e-10, 1e-7))


def test_a_step_by_hand():
    # Forward until 2 s; gradients at 4 and 6 s; 3 s each on the wire, or 5 together.
    link = HostLink(1.0, 0.5)
    assert predicted_step([4, 4], 4, 6.0, link) == 10.0
    assert predicted_step([4, 4], 8, 6.0, link) == 11.0
    assert predicted_step([4, 4], 8, 600.0, link) == 605.0
    assert predicted_step([], 8, 6.0, link) == 6.0


@given(MODELS, st.floats(1e-3, 10), LINKS, st.sampled_from([[], ["factors", "bf16"]]))
def test_a_search_finds_what_brute_force_finds_in_20_steps(sizes, compute, link, more):
    tries = []

    def seconds(choice):
        tries.append(choice)
        return predicted_step(sizes, choice.bucket_size, compute, link)

    searching = search(sizes, GIVEN, link, more)
    choice = next(searching)
    with pytest.raises(StopIteration) as end:
        while True:
            choice = searching.send(seconds(choice))
    best = min(
        predicted_step(sizes, size, compute, link)
        for size in (*tuning.SIZES, GIVEN.bucket_size)
    )
    assert 1 + len(tries) <= 20  # before them the given choice was traced
    kept, *_ = end.value.value
    assert seconds(kept) <= 1.05 * best
    assert all(len(calls) >= 2 for calls in end.value.value.values())
    step = predicted_step(sizes, GIVEN.bucket_size, compute, link)
    found = tuning.compute_of(sizes, GIVEN.bucket_size, step, link)
    again = predicted_step(sizes, GIVEN.bucket_size, found, link)
    assert again == pytest.approx(step, rel=1e-6)


@pytest.mark.parametrize(("gain", "taken"), [(0.04, None), (0.2, "bf16")])
def test_numbers_change_only_for_much(gain, taken):
    searching = search([1000], GIVEN, HostLink(1e-5, 1e-9), ["bf16"])
    choice, calls = next(searching), []
    with pytest.raises(StopIteration) as end:
        while True:
            # Two calls are slow, and one is faster than all others by chance.
            slow = {0: 30.0, 3: 3.0}.get(calls.count(choice), 1.5)
            if choice == GIVEN and calls.count(choice) == 4:
                slow = 0.1
            calls.append(choice)
            choice = searching.send(slow * (1 - gain * bool(choice.compressor)))
    kept, *_ = end.value.value
    assert kept.compressor == taken
    assert calls.count(GIVEN) == 2 + 7
    assert len(calls) == 9 + 1 + 9


@pytest.mark.parametrize("kind", [("aab", 3), ("tcp", 3), ("shared", 3)])
def test_pieces_are_those_of_all_ranks_and_keep_the_sums(kind):
    with Group(*kind) as group:
        links = group.run(tuning.measure_and_set_pieces)
        sizes = group.run(lambda c: c.piece_bytes)
        assert links == [links[0]] * 3
        assert sizes == [sizes[0]] * 3
        assert bool(sizes[0]) == (kind[0] != "shared")
        mine = np.arange(900_000, dtype=np.float32)
        for total in group.run(lambda c: c.all_reduce([mine])[0]):
            np.testing.assert_array_equal(total, 3 * mine)


@pytest.mark.parametrize("slow", ["tcp", "hierarchical"])
def test_the_faster_transport_is_kept(monkeypatch, slow):
    kind = {"tcp": RingCommunicator, "hierarchical": HierarchicalCommunicator}[slow]
    original = CheckedCommunicator.all_reduce

    def all_reduce(self, *args, **more):
        time.sleep(0.4 if type(self) is kind else 0)
        return original(self, *args, **more)

    monkeypatch.setattr(CheckedCommunicator, "all_reduce", all_reduce)
    addresses = addresses_of(4)

    def work(rank):
        cluster = cluster_on(addresses, rank)
        connected = functools.partial(connect, cluster, host="aabb"[rank])
        job = tuning.faster_job(connected(), lambda: connected(transport="tcp"))
        (total,) = job.communicator.all_reduce([np.float64(rank)])
        job.close()
        return job.transport, total

    with nothing_stays_open():
        (other,) = {"tcp", "hierarchical"} - {slow}
        assert in_threads(4, work) == [(other, 6.0)] * 4


SCRIPT = with_prelude("""
lines = lines_said()
rng = np.random.default_rng(0)
x = rng.normal(size=(320, 512)).astype("float32")
y = x.argmax(1) % 4

def train(compiled=False, **options):
    lines.clear()
    strategy = kerasdist.RingStrategy(timeout=60, transport="tcp", **options)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(512, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((512,)), *layers, keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=compiled)
    history = model.fit(x, y, batch_size=16, epochs=1, verbose=0).history
    sums = [float(np.abs(w).sum()) for w in model.get_weights()]
    workers = strategy.extended.workers
    found = [line for line in lines if "tune" in line or "bucket_size" in line]
    return {"loss": history["loss"], "sums": sums, "lines": found,
            "taken": [workers.bucket_size, repr(workers.memories.compressor)]}

found = [train(), train(tune=True), train(tune=True)]
if "MORE" in os.environ:
    found += [train(compression="auto"), train(compiled=True, tune=True)]
result(found)
""")


@pytest.mark.parametrize("more", [{}, soak({"MORE": "1"})], ids=["sizes", "all"])
def test_first_steps_are_tried_and_the_next_run_takes_what_was_found(tmp_path, more):
    env = {"KERASDIST_CHECKPOINT_DIR": str(tmp_path), **more}
    (first, second) = Workers(SCRIPT, 2, deadline=150, env=env).results()
    plain, tuned, again, *others = first
    for mine, theirs in zip(first, second, strict=True):
        assert [mine[name] for name in ("loss", "sums", "taken")] == [
            theirs[name] for name in ("loss", "sums", "taken")
        ]
        assert not theirs["lines"]
        # Sums of two are the same in any order, but not factors and 16 bits.
        rel = 1e-2 if mine in others[:1] else 1e-6
        assert mine["sums"] == pytest.approx(plain["sums"], rel=rel)
    assert plain["lines"] == []
    (line,) = tuned["lines"]
    assert "tuned in" in line
    assert "written to" in line
    assert again["taken"] == tuned["taken"]
    assert "from an earlier run" in again["lines"][0]
    said = ["tuned in", "no effect on steps that are compiled"]
    for found, line in zip(others, said, strict=False):
        assert line in found["lines"][0]
    assert len(list(tmp_path.glob("tuned-*.npz"))) == (2 if more else 1)


def test_a_file_that_is_damaged_is_measured_again(tmp_path):
    path = tmp_path / "tuned.npz"
    good = {"bucket_size": 4, "piece_bytes": 0, "compression": None}
    for wrong in ({"bucket_size": -4}, {"piece_bytes": 1}, {"compression": "x"}):
        write_arrays(path, good | wrong, [])
        assert tuning.read_known(path, ("bf16",)) is None
    for text in ("", "[]"):
        path.write_text(text)
        assert tuning.read_known(path, ("bf16",)) is None
    write_arrays(path, {"bucket_size": 4}, [])
    assert tuning.read_known(path, ()) is None
    write_arrays(path, good, [])
    assert (tuning.read_known(path, ()) or {}).items() >= good.items()
    assert tuning.read_known(tmp_path / "none", ()) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tune": 1}, "must be True or False"),
        ({"tune": True, "local_steps": 4}, "local_steps=LocalSteps"),
        ({"compression": "auto", "elastic": True}, "compression='auto' with elastic"),
    ],
)
def test_what_has_no_answer_is_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        kerasdist.RingStrategy(**options)
