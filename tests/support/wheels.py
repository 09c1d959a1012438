"""The wheel in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import kerasdist._version
from pace import bound
from workers import python_env

VERSION = kerasdist._version.__version__


def run(*command, cwd, **env):
    done = subprocess.run(
        command,
        cwd=cwd,
        # Without PYTHONPATH: what is imported must be what was installed.
        env={k: v for k, v in python_env(env).items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=bound(120),
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def install(folder, *what, cwd):
    """Creates a virtual environment, installs into it, returns its bin folder.

    TensorFlow and the rest come from the environment of the tests: a `.pth` file
    names its folder. Editable installs of that environment don't come along,
    because `.pth` files aren't read in a folder that a `.pth` file has added.
    """
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", script, cwd=folder).strip())
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "tests.pth").write_text("\n".join(sorted(paths)) + "\n")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        # Also where the tests' environment has kerasdist already.
        *("--ignore-installed", "--no-deps", "--no-index", "--no-build-isolation"),
        *what,
        cwd=cwd,
    )
    return folder / "bin"
