"""`kerasdist run` blames the rank that the workers of a real job blame."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("output", ["chief", "all"])
def test_the_cause_is_shown_first_however_late_its_process_ends(launcher, output):
    """The others' own errors follow from it; a hook of the script's own stays."""
    script = """
import atexit, itertools
import numpy as np
import kerasdist.cluster
from kerasdist.collectives import connect
from kerasdist.transport.liveness.failure_protocol import hand_over_final_error
from kerasdist.transport.deadline import Timeouts

job = connect(kerasdist.cluster.resolve(), timeouts=Timeouts(heartbeat=30.0))
mark(f"up-{rank}", os.getpid())

def steps(count=None):
    for step in itertools.count() if count is None else range(count):
        job.communicator.all_reduce([np.ones(100, np.float32)])

if rank == 2:
    sys.excepthook = lambda *error: print("my hook:", error[0].__name__)
hand_over_final_error()

def tidy_up():
    # As TensorFlow does: the process goes on when kerasdist has left already.
    for other in (0, 2):
        wait_for_end(Path(f"up-{other}").read_text())
    time.sleep(1.0)  # longer than the launcher waits for others
    os._exit(9)

if rank == 1:
    wait_for("up-0"), wait_for("up-2")
    # Handlers run in the reverse order: leaving as a strategy does comes first.
    atexit.register(tidy_up)
    atexit.register(lambda: job.close(getattr(sys, "last_value", None)))
    steps(5)
    raise ValueError("the real reason")
steps()
"""
    code, out, err = launcher.run(
        *("-n", 3, "--output", output, "script.py"),
        script=script,
        before="from kerasdist.cli.run import supervisor as s; "
        "s.LET_THEM_FAIL = 0.5; s.LET_CAUSE_END = 60",
    )
    assert code == 9, err
    assert "rank 1 failed with exit code 9; the other workers were ended" in err
    shown = err[err.index("the end of rank 1's output:") :]
    assert re.search(r"^Traceback [^\0]*\nValueError: the real reason$", shown, re.M)
    text = out + err
    assert "WorkerLost: Rank 1 " not in text[: text.index("ValueError: the real")]
    after = "kerasdist run: afterwards rank {} failed with exit code 1"
    assert f"{after.format(0)}: kerasdist.errors.WorkerLost: Rank 1 " in err
    assert f"{after.format(2)}\n" in err
    if output == "all":
        assert "[2] my hook: WorkerLost\n" in out
    else:
        assert err.count("Traceback") == 1, err
