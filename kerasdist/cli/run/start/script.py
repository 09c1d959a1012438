"""The script or module that a job runs."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

# An interpreter's name, which other launchers want before the script.
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")


def check_command(
    script: Sequence[str], environ: MutableMapping[str, str], faults: list[str]
) -> tuple[str, ...]:
    """Return the script or module and its arguments; check that it exists.

    Args:
        script: What follows the options; an interpreter may stand in front.
        environ: Gets what the interpreter's options mean.
        faults: Takes a message about each thing that can't be used.
    """
    script = list(script)
    if script[:1] == ["-m"]:
        if len(script) < 2:
            faults.append("-m must be followed by the name of a module")
        elif not _module_exists(script[1]):
            faults.append(
                f"there is no module {script[1]!r} that can be run. Received: -m "
                f"{shlex.quote(script[1])}"
            )
        return tuple(script)
    if not script:
        faults.append("expected a script, or -m and a module")
        return ()
    if len(script) > 1 and _PYTHON.fullmatch(Path(script[0]).name):
        # `kerasdist run -n 2 python train.py`, as with mpirun. Our own Python runs it.
        script = script[1:]
        while script[:1] == ["-u"]:
            environ["PYTHONUNBUFFERED"] = "1"
            script = script[1:]
        if script[:1] == ["-m"] or not script:
            return check_command(script, environ, faults)
    path = Path(script[0])
    if path.is_dir():
        if not (path / "__main__.py").exists():
            faults.append(f"{script[0]} is a folder without a __main__.py")
    elif not path.exists():
        faults.append(
            f"there is no script {script[0]!r} (in {os.getcwd()}). Expected the path "
            "of a Python file"
        )
    elif not os.access(path, os.R_OK):
        faults.append(f"the script {script[0]!r} can't be read")
    # With a name like "-x.py" Python would see an option.
    return (str(path) if not script[0].startswith("-") else f"./{path}", *script[1:])


def _module_exists(name: str) -> bool:
    """Return whether `python -m name` will find it, without importing any of it."""
    first, *rest = name.split(".")
    if not all(part.isidentifier() for part in (first, *rest)):
        return False
    # `python -m` looks in the current folder first.
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(first)
        found = first
        for part in (*rest, "__main__"):
            if spec is None:
                return False
            if spec.submodule_search_locations is None:
                return part == "__main__"
            found = f"{found}.{part}"
            spec = importlib.machinery.PathFinder.find_spec(
                found, list(spec.submodule_search_locations)
            )
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]
    return spec is not None
