"""The functions that a page of the documentation names, and their calls."""

import functools
import importlib
import os
import re
import sys


def names_on(page):
    """Return the names at the begin of a page's numbered items."""
    return re.findall(r"^\d+\. `([\w.]+)`", page, re.MULTILINE)


def find(name):
    parts = ["kerasdist", *name.split(".")]
    for end in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:-1]:
            owner = getattr(owner, part)
        return owner, vars(owner)[parts[-1]]
    raise LookupError(name)


def track(path, names):
    """Write into a file when each of the functions is called and when it has ended.

    Modules that have imported a function get what writes instead; so call it before
    anything else keeps the function.
    """
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for name in names:
        owner, function = find(name)
        tracked = _tracked(file, name, function)
        setattr(owner, function.__name__, tracked)
        for module in list(sys.modules.values()):
            if vars(module).get(function.__name__) is function:
                setattr(module, function.__name__, tracked)


def _tracked(file, name, function):
    @functools.wraps(function)
    def tracked(*args, **kwargs):
        os.write(file, f"begin {name}\n".encode())
        try:
            return function(*args, **kwargs)
        finally:
            os.write(file, f"end {name}\n".encode())

    return tracked
