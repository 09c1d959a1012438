"""`kerasdist run` as tests start it: in a folder, with scripts that tell what they do.

    with launcher_in(tmp_path) as launcher:
        code, out, err = launcher.run("-n", 2, "script.py", script="print(rank)")

Scripts begin with `PRELUDE`. When the block ends no process of the job is left.
"""

import contextlib
import os
import pty
import re
import secrets
import select
import subprocess
import sys
import textwrap
import time

import psutil

from pace import bound
from waiting import wait_until
from workers import TAG, kill_tagged, python_env

PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
rank = config["task"]["index"]

def mark(name, text=""):  # whole, or not there
    part = f"{name}.{os.getpid()}.part"  # a worker and a server may have one rank
    Path(part).write_text(str(text))
    os.replace(part, name)

def wait_for(name):
    end = time.monotonic() + 60
    while not Path(name).exists():
        if time.monotonic() > end:
            sys.exit(f"{name} didn't come")
        time.sleep(0.01)

def wait_for_end(pid):  # also of one that nobody has asked about
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        if "State:\tZ" in status:
            return
        time.sleep(0.01)
    sys.exit(f"process {pid} didn't end")

def hang():
    mark(f"up-{rank}", os.getpid())
    wait_for("never")
"""
HANG = "hang()\n"
_QUICK = (
    "from kerasdist.cli.run import supervisor as s; s.FROZEN_SECONDS = 0.1; "
    "s.LET_THEM_FAIL = s.TERM_TO_KILL = s.LET_LOST_END = 0.2"
)
_MAIN = "import sys; from kerasdist.cli import main; sys.exit(main())"


class Launcher:
    """`kerasdist run` in a folder of its own; everything is gone afterwards."""

    def __init__(self, folder):
        self.folder = folder
        self.tag = secrets.token_hex(8)
        self.env = python_env({TAG: self.tag, "TMPDIR": str(folder / "tmp")})
        for name in ("OMP_NUM_THREADS", "TF_NUM_INTEROP_THREADS"):
            self.env.pop(name, None)
        (folder / "tmp").mkdir()
        self.processes = []
        # The command by which it runs, e.g. on a host of `hosts.py`.
        self.prefix = []
        # Which of kerasdist's commands.
        self.verb = "run"

    def command(self, *args, script, quick=False, before=""):
        if script is not None:
            text = PRELUDE + textwrap.dedent(script)
            (self.folder / "script.py").write_text(text)
        before = before or (_QUICK if quick else "")
        begin = ["-c", f"{before}; {_MAIN}"] if before else ["-m", "kerasdist"]
        return [*self.prefix, sys.executable, *begin, self.verb, *map(str, args)]

    def start(self, *args, script=None, quick=False, before="", **more):
        more = {"stdin": subprocess.DEVNULL, "start_new_session": True, **more}
        process = subprocess.Popen(
            self.command(*args, script=script, quick=quick, before=before),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            env=self.env,
            text=True,
            **more,
        )
        self.processes.append(process)
        return process

    def start_plain(self, *args, env):
        process = subprocess.Popen(
            [sys.executable, *args], cwd=self.folder, env={**self.env, **env}
        )
        self.processes.append(process)
        return process

    def run(self, *args, script=None, within=60.0, **more):
        process = self.start(*args, script=script, **more)
        out, err = process.communicate(timeout=bound(within))
        return process.returncode, out, err

    def finish(self, process, *names):
        """Make the files for which the tasks wait; return as `run` does."""
        for name in names or ("enough",):
            (self.folder / name).touch()
        out, err = process.communicate(timeout=60)
        self.nothing_runs(within=5.0)
        return process.returncode, out, err

    def wait_for(self, *names):
        wait_until(lambda: all((self.folder / n).exists() for n in names), names)
        return [(self.folder / name).read_text() for name in names]

    def pids(self, *names):
        return [int(text) for text in self.wait_for(*names)]

    def temporary(self):
        return list((self.folder / "tmp").iterdir())

    def nothing_runs(self, within=30.0):
        def gone():
            return not any(_is_ours(p, self.tag) for p in psutil.process_iter())

        wait_until(gone, "the end of all processes", within)


def _is_ours(process, tag):
    try:
        return (
            process.status() != psutil.STATUS_ZOMBIE
            and process.environ().get(TAG) == tag
        )
    except psutil.Error:
        return False


@contextlib.contextmanager
def launcher_in(folder):
    """A `Launcher`; whatever it has started is ended with the block."""
    launcher = Launcher(folder)
    try:
        yield launcher
    finally:
        kill_tagged(launcher.tag)
        for process in launcher.processes:
            with process:
                process.kill()
        # Orphans of a killed launcher are ours.
        for child in psutil.Process().children():
            if child.status() == psutil.STATUS_ZOMBIE:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)


def wait_until_said(process, text):
    """Read what a launcher says until this; return that line, without ports."""
    for found in process.stderr:
        line = re.sub(r"\(127\.0\.0\.1:\d+\)", "(HOST)", found)
        if text in line:
            return line
    raise AssertionError(f"{text!r} was never said")


class Terminal:
    """A real terminal with a launcher as its foreground job."""

    def __init__(self, launcher, *args, script):
        command = launcher.command(*args, script=script)
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(launcher.folder)
            os.execve(command[0], command, launcher.env)
        self.output = b""

    def read(self, within=60.0):
        end = time.monotonic() + bound(within)
        while select.select([self.fd], [], [], max(0.0, end - time.monotonic()))[0]:
            try:
                data = os.read(self.fd, 65536)
            except OSError:
                data = b""
            if not data:
                return self.output.decode()
            self.output += data
        raise AssertionError(f"The terminal is still in use.\n{self.output.decode()}")

    def wait(self):
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def terminals_of(launcher):
    """A function that opens a `Terminal`; all are closed after the block."""
    opened = []

    def start(*args, script):
        opened.append(Terminal(launcher, *args, script=script))
        return opened[-1]

    yield start
    kill_tagged(launcher.tag)
    for each in opened:
        os.close(each.fd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(each.pid, 0)
