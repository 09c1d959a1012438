"""The call that travels to all workers: a function, its arguments, and what they need.

One file has two pickles. The first has plain data only: `sys.path` and the text of the
notebook's cells. The second, the call itself, is loaded after these are in place.
"""

from __future__ import annotations

import dataclasses
import linecache
import mmap
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from kerasdist.functions.pickling import dump


@dataclasses.dataclass(frozen=True)
class Call:
    """A function and its arguments."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)


@dataclasses.dataclass(frozen=True)
class _Surroundings:
    """The state of the caller's interpreter that the call needs."""

    path: list[str]
    arguments: list[str]
    python_path: str | None
    # By file name, of code that is in no file, or in the script's.
    sources: dict[str, list[str]]


def write_call(call: Call) -> IO[bytes]:
    """Return an unnamed file with a call, for `load_call`.

    Raises:
        OSError: It can't be written.
        Exception: The call can't be pickled; classes raise what they like.
    """
    path = [os.path.abspath(each) for each in sys.path if isinstance(each, str)]
    surroundings = _Surroundings(
        path=path,
        arguments=list(sys.argv),
        python_path=os.environ.get("PYTHONPATH"),
        sources=_sources(),
    )
    file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        pickle.dump(dataclasses.astuple(surroundings), file)
        dump((call.function, call.args, dict(call.kwargs)), file)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def _sources() -> dict[str, list[str]]:
    """Return the lines of a notebook's cells, and of the script.

    Without them tracebacks of the workers have no lines, and `tf.function` can't
    convert Python's `if` and `while`.
    """
    found = {}
    # Cells are there as files that don't exist.
    for name, entry in list(linecache.cache.items()):
        if len(entry) > 1 and not os.path.exists(name):
            found[name] = list(entry[2])
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(script, str):
        found[script] = linecache.getlines(script)
    return found


def load_call(descriptor: int) -> Call:
    """Prepare this interpreter for a call, and return it.

    Args:
        descriptor: Of the file. Others may read it at the same time.

    Raises:
        Exception: It can't be unpickled here; classes raise what they like.
    """
    # Processes that inherit a descriptor share its position; that of a map is its own.
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as file:
        surroundings = _Surroundings(*pickle.load(file))
        own = [each for each in sys.path if each not in surroundings.path]
        sys.path[:] = surroundings.path + own
        sys.argv[:] = surroundings.arguments
        # The caller's own, without what the launcher needs to find this package.
        if surroundings.python_path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = surroundings.python_path
        for name, lines in surroundings.sources.items():
            if not os.path.exists(name):
                size = sum(map(len, lines))
                linecache.cache[name] = (size, None, lines, name)
        return Call(*pickle.load(file))
