"""`kerasdist.run` in a notebook: a real kernel, driven as Jupyter drives it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from launching import Launcher
from pace import bound

_MISSING = [
    name
    for name in ("ipykernel", "jupyter_client")
    if importlib.util.find_spec(name) is None
]

# A notebook's server, with a user who waits for what is shown.
DRIVER = """
import os, queue, sys, time
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)

def begin(code):
    return client.execute(code)

def shown(until):
    # What the cell shows, until a text is there, or the cell has ended.
    text = ""
    while until is None or until not in text:
        message = client.get_iopub_msg(timeout=60)
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            text += content["text"]
        elif kind == "error":
            text += "\\n".join(content["traceback"])
        elif kind == "execute_result":
            text += content["data"]["text/plain"]
        elif kind == "status" and content["execution_state"] == "idle":
            if until is None:
                return text
    return text

def pids():  # when both workers are up
    end = time.monotonic() + 60
    while not (os.path.exists("up-0") and os.path.exists("up-1")):
        if time.monotonic() > end:
            sys.exit("they didn't come")
        time.sleep(0.01)
    return [int(open(f"up-{rank}").read()) for rank in range(2)]

try:
    begin('''
import inspect, json, os, time
import kerasdist

def rank():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]

def wait():
    print(f"step 1 of {rank()}")
    while not os.path.exists("seen"):
        time.sleep(0.01)
    print("step 2\\\\rstep 3")
    return rank(), inspect.getsource(rank).count("TF_CONFIG")

def fail():
    raise LookupError("made")  # here

def hang():
    with open(f"up-{rank()}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"up-{rank()}.part", f"up-{rank()}")
    time.sleep(1000)
''')
    assert shown(None) == ""

    begin("kerasdist.run(wait, n=2)")
    first = shown("step 1 of 0\\n")
    open("seen", "w").close()
    rest = shown(None)
    assert "step 2\\rstep 3\\n" in rest, rest
    # Cells have no file; the workers know their lines.
    assert rest.endswith("[(0, 1), (1, 1)]"), rest
    assert "of 1" not in first + rest, first + rest

    begin("kerasdist.run(fail, n=1)")
    text = shown(None)
    assert "FunctionError" in text and "LookupError" in text, text
    assert 'raise LookupError("made")  # here' in text, text

    begin("kerasdist.run(hang, n=2)")
    found = pids()
    manager.interrupt_kernel()
    text = shown(None)
    assert "KeyboardInterrupt" in text, text
    assert not any(os.path.exists(f"/proc/{pid}") for pid in found)
    os.remove("up-0")
    os.remove("up-1")

    begin("kerasdist.run(hang, n=2)")
    pids()
finally:
    manager.shutdown_kernel(now=True)
    client.stop_channels()
print("DONE")
"""


@pytest.mark.skipif(
    bool(_MISSING) and not os.environ.get("CI"), reason=f"{_MISSING} isn't installed"
)
def test_a_notebook(launcher: Launcher) -> None:
    """Output is there while it's made; interrupt and kill leave nothing behind."""
    launcher.env["JUPYTER_RUNTIME_DIR"] = str(launcher.folder / "runtime")
    launcher.env["IPYTHONDIR"] = str(launcher.folder / "ipython")
    (launcher.folder / "driver.py").write_text(DRIVER)
    done = subprocess.run(
        [sys.executable, "driver.py"],
        cwd=launcher.folder,
        env=launcher.env,
        capture_output=True,
        text=True,
        timeout=bound(120),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "DONE\n"
    launcher.nothing_runs()
