"""A real TensorBoard, and a real Chromium to look at pages with."""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pace import bound
from places import ROOT
from workers import TAG, kill_tagged, python_env

_START = 60.0  # seconds until TensorBoard listens


def need(reason: str | None, remedy: str) -> None:
    """Skip the test if there's a reason to; in CI that's a failure."""
    if reason is None:
        return
    if os.environ.get("CI"):
        # There it would be a hole in the net that nobody sees.
        pytest.fail(f"This test must run in CI, but {reason}.")
    pytest.skip(f"{reason} ({remedy}).")


def need_browser() -> None:
    missing = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    missing += [] if importlib.util.find_spec("selenium") else ["selenium"]
    reason = f"there is no {' and no '.join(missing)}" if missing else None
    need(reason, "Debian, Ubuntu: chromium, chromium-driver")


def tensorboard_python() -> str:
    """Return the Python whose TensorBoard starts: this one, or that of `make viewers`.

    The TensorBoard of the oldest TensorFlow imports `pkg_resources`, which setuptools
    doesn't have any more.
    """
    command = [sys.executable, "-c", "import tensorboard.default"]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:
        return sys.executable
    python = ROOT / ".venv-viewers/bin/python"
    need(None if python.exists() else "TensorBoard doesn't start", "make viewers")
    return str(python)


@contextlib.contextmanager
def tensorboard(folder: Path, python: str = sys.executable) -> Iterator[str]:
    tag = f"board-{os.getpid()}"
    log = folder.parent / "tensorboard.log"
    command = [python, "-m", "tensorboard.main", "--logdir", str(folder)]
    # Its other loader is a program of its own, which isn't there for every machine. A
    # page that comes before the data isn't renewed: all is read before it listens.
    command += ["--host", "127.0.0.1", "--port", "0", "--load_fast", "false"]
    command += ["--reload_task", "blocking", "--reload_interval", "0"]
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=python_env({TAG: tag}),
            start_new_session=True,
        )
    try:
        end = time.monotonic() + _START
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/", log.read_text())):
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"TensorBoard didn't start.\n{log.read_text()}")
            time.sleep(0.1)  # nothing tells when it listens but its output
        yield found[0]
    finally:
        kill_tagged(tag)
        process.wait(bound(30))


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium")
    # The tests may be root's. A small page on which nothing moves is drawn quickly.
    switches = (
        "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage "
        "--disable-background-networking --force-prefers-reduced-motion "
        "--window-size=500,400"
    )
    for argument in (*switches.split(), f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(argument)
    driver = webdriver.Chrome(
        options=options, service=Service(shutil.which("chromedriver"))
    )
    # A busy machine may take long to draw what a script then looks at.
    driver.set_script_timeout(bound(_START))
    try:
        yield driver
    finally:
        driver.quit()
        driver.service.stop()


@contextlib.contextmanager
def served(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve pages; yields the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = False  # closing waits for them
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
