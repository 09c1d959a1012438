import contextlib
import gzip
import json

import keras
import numpy as np
import pytest
from scripts import with_prelude

import kerasdist
from groups import Group
from kerasdist.callbacks import Timeline
from kerasdist.callbacks.timeline import Record, processes, trace
from kerasdist.strategies.measure.communication import Span
from kerasdist.strategies.measure.stages import Offset, clock_offset
from kerasdist.transport.tracing import NAMES, now
from workers import Workers

COMMON = with_prelude("""
from kerasdist.callbacks import ScaleLearningRate, Timeline

folder = os.environ["FOLDER"]
x = np.random.default_rng(0).normal(size=(48, 300)).astype("float32")

def build(**more):
    with strategy.scope():
        m = keras.Sequential([
            keras.Input((300,)), keras.layers.Dense(300), keras.layers.Dense(1)])
        m.compile("sgd", "mse", **more)
    return m

def fit(m, callbacks, **more):
    m.fit(x, x[:, :1], **{"batch_size": 8, "epochs": 3, "verbose": 0, **more},
          callbacks=callbacks)

def recorders(communicator):
    "Its recorders now."
    def add(recorder, before=communicator.add_recorder):
        found.append(recorder)
        before(recorder)
    def remove(recorder, before=communicator.remove_recorder):
        found[:] = [each for each in found if each is not recorder]
        before(recorder)
    found = []
    communicator.add_recorder, communicator.remove_recorder = add, remove
    return found
""")


def read(path):
    """The complete events of a trace by rank, after the whole has been checked."""
    data = path.read_bytes()
    found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    ranks, owners = {}, {}
    for event in found["traceEvents"]:
        assert event["ph"] in ("X", "M")
        # Perfetto takes 0 for none, and threads of one number for one, whosever it is.
        assert event["pid"] > 0
        assert event["tid"] > 0
        assert owners.setdefault(event["tid"], event["pid"]) == event["pid"]
        event["pid"] = event["pid"] // 1000 - 1
        event["tid"] = event["tid"] % 1000 - 1
        if event["ph"] == "M":
            assert event["name"].startswith(("process_", "thread_"))
            continue
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        ranks.setdefault(event["pid"], []).append(event)
    for events in ranks.values():
        nested(events)
    return found, ranks


def nested(events):
    """In each lane events contain each other or don't overlap: a viewer needs it."""
    for lane in {event["tid"] for event in events}:
        ends = []
        for event in (e for e in events if e["tid"] == lane):
            begin, end = event["ts"], event["ts"] + event["dur"]
            while ends and ends[-1] <= begin + 1e-3:
                ends.pop()
            if ends:
                assert end <= ends[-1] + 2e-3, event
            ends.append(end)


def named(events, name):
    return [event for event in events if event["name"] == name]


def inside(part, whole, margin=2e-3):
    return (
        whole["ts"] - margin <= part["ts"]
        and part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] + margin
    )


# A step's parts, by hand.


def test_the_parts_of_an_execution():
    spans = [
        Span("all_reduce", 5, 8, step=0),  # before the first bucket of a step
        Span("all_reduce", 20, 30, 400, "#1", step=1),
        Span("pack", 21, 23, 400, step=1),
        Span("send", 24, 29, 200, step=1),
        Span("all_reduce", 35, 40, step=1),
        Span("all_reduce", 70, 80, step=2),
    ]
    spans = [
        Span(s.name, s.begin * 1000, s.end * 1000, s.size, s.what, 7, s.step)
        for s in spans
    ]
    ran = [Span("steps 4 to 5", 0, 100_000)]
    record = Record(1, "b", [Offset(0, 5000, 10)], ran, spans)
    found = trace([record])
    assert found["otherData"]["clock_error_us"] == {"1": 0.01}
    events = [e for e in found["traceEvents"] if e["ph"] == "X"]
    steps = [(e["name"], e["ts"], e["dur"]) for e in events if e["cat"] == "step"]
    assert steps == [
        ("steps 4 to 5", 0.0, 100.0),
        ("compute", 0.0, 20.0),
        ("exchange", 20.0, 20.0),
        ("update, compute", 40.0, 30.0),
        ("exchange", 70.0, 10.0),
        ("update", 80.0, 20.0),
    ]
    nested(events)
    assert Record.from_json(json.loads(json.dumps(vars(record)))) == record


def test_stages_do_one_thing_at_a_time():
    stages = [
        # Its end was read late, and both begins of the next two in one microsecond.
        Span("forward 0", 10_000, 90_000),
        Span("forward 1", 30_000, 40_000),
        Span("forward 2", 30_000, 50_000),
        Span("compute", 5_000, 70_000),
        Span("compute", 60_000, 80_000),
        Span("compute", 35_000, 45_000, thread=1),
        Span("backward 0", 100_000, 120_000, thread=1),
        # A stage without micro-batches.
        Span("compute", 1_000, 2_000, thread=2),
    ]
    ran = [Span("step 0", 0, 200_000)]
    found = trace([Record(0, "a", [Offset(0, 0, 0)], ran, stages=stages)])
    events = [e for e in found["traceEvents"] if e.get("cat") == "stage"]
    nested(events)
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events] == [
        (1501, "compute", 5.0, 5.0),
        (1501, "forward 0", 10.0, 20.0),
        (1501, "forward 1", 30.0, 0.001),
        (1501, "forward 2", 30.001, 19.999),
        (1501, "compute", 50.0, 20.0),
        (1501, "compute", 70.0, 10.0),
        (1502, "compute", 35.0, 10.0),
        (1502, "backward 0", 100.0, 20.0),
        (1503, "compute", 1.0, 1.0),
    ]


def test_two_ranks_have_one_clock():
    # Rank 1 is 1 ms ahead, and 2 ms when 100 ms have passed.
    ahead = [Offset(0, 1_000_000, 5), Offset(100_000_000, 2_000_000, 7)]
    one = Record(1, "b", ahead, [Span("step 0", 51_500_000, 61_500_000)])
    zero = Record(0, "a", [Offset(0, 0, 0)], [Span("step 0", 49_900_000, 60_000_000)])
    events = [e for e in trace([zero, one])["traceEvents"] if e["name"] == "step 0"]
    assert [e["ts"] for e in events] == [0.0, pytest.approx(85.0)]
    # They are sorted by their titles, as Perfetto does.
    records = [Record(r, "a", zero.offsets, zero.executions) for r in range(11)]
    titles = [process.title for process in processes(records)]
    assert titles[2] == "rank 02 (a)"
    assert titles == sorted(titles)
    assert processes(records[:10])[2].title == "rank 2 (a)"


@pytest.mark.parametrize(("kind", "size"), [("unix", 3), ("single", 1)])
def test_clocks_that_differ(kind, size):
    def work(communicator):
        wrong = communicator.rank * 5_000_000_000
        return clock_offset(communicator, clock=lambda: now() + wrong)

    with Group(kind, size) as group:
        found = group.run(work)
    for rank, offset in enumerate(found):
        assert abs(offset.ahead - rank * 5_000_000_000) <= offset.error
        assert offset.error < 50_000_000


# With strategies.

RING = """
from kerasdist.strategies.measure.communication import Slot
strategy = kerasdist.RingStrategy(timeout=60, bucket_size=100_000)
recording = recorders(strategy.communicator)
m = build()
from kerasdist._keras.shared_state import JobCallback
class Late(JobCallback):
    never_stops = True
    def on_train_batch_begin(self, batch, logs=None):
        if strategy.rank == 1 and self.params and batch == 2:
            time.sleep(0.2)
line = Timeline(folder + "/deep/ring.json", steps=(7, 10))
fit(m, [line, Late(), ScaleLearningRate(verbose=0)])
silent = [not recording]
fit(build(steps_per_execution=2), [Timeline(folder + "/two.json.gz", steps=(5, 8))])
fit(m, [Timeline(folder + "/end.json", steps=(16, 100))])
fit(m, [Timeline(folder + "/none.json", steps=(50, 100))])
silent.append(not recording)
# Nor were steps measured: these have no stages.
timer = strategy.extended.kerasdist.timer
silent.append(not timer._summed.read()[Slot.MEASURED:].any())
# Nor does anybody listen when `fit` has failed.
class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if recording:
            raise KeyError("here")
try:
    fit(m, [Timeline(folder + "/failed.json", steps=(0, 10)), Fails()])
except KeyError:
    silent.append(not recording)
result(silent)
"""


def test_ring(tmp_path):
    env = {"FOLDER": str(tmp_path)}
    finished = Workers(COMMON + RING, 2, env=env, deadline=90).run()
    assert [each.result for each in finished] == [[True] * 4] * 2
    found, ranks = read(tmp_path / "deep" / "ring.json")
    assert sorted(ranks) == [0, 1]
    error = max(found["otherData"]["clock_error_us"].values())
    assert 0 < error < 20_000
    reduced = {}
    for rank, events in ranks.items():
        steps = [e for e in events if e["name"].startswith("step ")]
        assert [e["name"] for e in steps] == ["step 7", "step 8", "step 9"]
        collectives = named(events, "all_reduce")
        # The kernel of 360,000 bytes doesn't share its bucket: there are two at least.
        assert len(collectives) >= 6
        assert {360_000} <= {e["args"].get("bytes") for e in collectives}
        reduced[rank] = collectives
        for step in steps:
            parts = [e for e in events if e["tid"] == 0 and e is not step]
            names = [e["name"] for e in parts if inside(e, step)]
            assert names[0] == "compute"
            assert names[-1] == "update"
            assert "exchange" in names
            assert sum(inside(e, step) for e in collectives) >= 2
        for event in events:
            if event["name"] in NAMES:
                assert any(inside(event, whole) for whole in collectives), event
        assert {"pack", "wait", "reduce"} <= {e["name"] for e in events}
    # The n-th collective is the same one on both ranks: nobody ends before all began.
    zero, one = reduced[0], reduced[1]
    assert len(zero) == len(one)
    for first, second in zip(zero, one, strict=True):
        assert first["args"]["what"] == second["args"]["what"]
        for a, b in ((first, second), (second, first)):
            assert a["ts"] + a["dur"] >= b["ts"] - 2 * error
    # Rank 0 waited for rank 1, which was late at step 8.
    late = next(e for e in ranks[0] if e["name"] == "step 8")
    waited = [e for e in named(ranks[0], "wait") if inside(e, late)]
    assert sum(e["dur"] for e in waited) > 150_000
    lines = finished[0].output.splitlines()
    assert any("the timeline of 2 rank(s) is in" in line for line in lines)
    assert any("none.json isn't written: `fit` ended after 18" in x for x in lines)
    assert "timeline" not in finished[1].output
    # Several steps in one execution: those that the window touches.
    _, ranks = read(tmp_path / "two.json.gz")
    for events in ranks.values():
        names = [e["name"] for e in events if e["name"].startswith("steps ")]
        assert names == ["steps 4 to 5", "steps 6 to 7"]
        assert len(named(events, "update, compute")) == 2
    # `fit` ended before the window did.
    _, ranks = read(tmp_path / "end.json")
    for events in ranks.values():
        names = [e["name"] for e in events if e["name"].startswith("step ")]
        assert names == ["step 16", "step 17"]
    for name in ("none.json", "failed.json"):
        assert not (tmp_path / name).exists()


SERVERS = """
strategy = kerasdist.ParameterServerStrategy(MODE, timeout=60)
recording = recorders(strategy.communicator)
fit(build(), [Timeline(folder + "/trace.json", steps=(2, 4))])
result(not recording)
"""


@pytest.mark.soak
def test_parameter_servers(tmp_path):
    # In lockstep, or else one of them may take nearly all of the few steps.
    script = COMMON + SERVERS.replace("MODE", "'async', max_staleness=0")
    env = {"FOLDER": str(tmp_path)}
    assert all(Workers(script, 2, servers=1, env=env, deadline=90).results())
    _, ranks = read(tmp_path / "trace.json")
    assert sorted(ranks) == [0, 1]
    for events in ranks.values():
        steps = [e for e in events if e["name"].startswith("step ")]
        assert 0 < len(steps) <= 2
        assert named(events, "push_pull")
        assert {"pack", "send", "wait"} <= {e["name"] for e in events}
        for step in steps:
            assert any(inside(e, step) for e in named(events, "push_pull"))
            assert any(inside(e, step) for e in named(events, "exchange"))


def test_one_worker_and_none(tmp_path, said):
    def placed():
        return kerasdist.ModelParallelStrategy({".*": "/device:CPU:0"})

    x = np.ones((32, 4), "float32")
    for name, make in (
        ("server.json", lambda: kerasdist.ParameterServerStrategy("async")),
        ("placed", placed),  # for TensorBoard
        ("none.json", None),
    ):
        strategy = make() if make else None
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        path = tmp_path / name
        line = Timeline(path, steps=(1, 3))
        model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[line])
        if make is placed:
            (folder,) = (path / "plugins" / "profile").iterdir()
            path = folder / "timeline.trace.json.gz"
            names = sorted(each.name for each in folder.iterdir())
            assert names == [path.name, "timeline.xplane.pb"]
        _, ranks = read(path)
        steps = [e["name"] for e in ranks[0] if e["name"].startswith("step ")]
        assert steps == ["step 1", "step 2"]
        if hasattr(strategy, "close"):
            strategy.close()
    assert sum("clocks right to 0.0 us" in line for line in said()) == 3


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"^`Timeline` can't be made\. Received:") as e:
        Timeline("trace.txt", steps=(5, 5))
    assert "path='trace.txt'; expected a name in .json, .json.gz, " in str(e.value)
    assert "steps=(5, 5); expected two numbers" in str(e.value)
