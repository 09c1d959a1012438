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
import os, threading, time
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)

def shown(code, look=lambda text: None):
    parts = []

    def add(message):
        content = message["content"]
        lines = content.get("traceback", [content.get("text", "")])
        parts.extend([*lines, content.get("data", {}).get("text/plain", "")])
        look("".join(parts))

    client.execute_interactive(code, timeout=60, output_hook=add)
    return "".join(parts)

def when_both_are_up(act):
    while not (os.path.exists("up-0") and os.path.exists("up-1")):
        time.sleep(0.01)
    act()

def look(text):
    if "step 1 of 0\\n" in text:
        open("seen", "w").close()

try:
    assert shown('''
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
    open(f"up-{rank()}", "w").close()
    time.sleep(1000)
''') == ""

    text = shown("kerasdist.run(wait, n=2)", look)
    assert "step 2\\rstep 3\\n" in text, text
    # Cells have no file; the workers know their lines.
    assert text.endswith("[(0, 1), (1, 1)]"), text
    assert "of 1" not in text, text

    text = shown("kerasdist.run(fail, n=1)")
    assert "FunctionError" in text and "LookupError" in text, text
    assert 'raise LookupError("made")  # here' in text, text

    stop = threading.Thread(target=when_both_are_up, args=[manager.interrupt_kernel])
    stop.start()
    text = shown("kerasdist.run(hang, n=2)")
    assert "KeyboardInterrupt" in text, text
    os.remove("up-0")
    os.remove("up-1")

    client.execute("kerasdist.run(hang, n=2)")
    when_both_are_up(lambda: None)
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
