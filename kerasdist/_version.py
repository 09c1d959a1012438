"""The version of kerasdist, and those of TensorFlow and Keras that were tested.

This is the one place with them.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping

__version__ = "0.1.0"

# By package: the oldest and the newest one with which the test suite was run.
TESTED_VERSIONS: Mapping[str, tuple[str, str]] = types.MappingProxyType(
    {"keras": ("3.14", "3.15"), "tensorflow": ("2.18", "2.21")}
)


def range_in_words(package: str) -> str:
    """Return the tested versions of a package in words, "3.14 to 3.15"."""
    oldest, newest = TESTED_VERSIONS[package]
    return f"{oldest} to {newest}"


def was_tested(package: str, version: str) -> bool:
    """Return whether a version is in the tested range; its patch level doesn't count.

    Args:
        package: "keras" or "tensorflow".
        version: Its `__version__`. A version that isn't numbered counts as untested.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return False
    oldest, newest = (
        tuple(map(int, bound.split("."))) for bound in TESTED_VERSIONS[package]
    )
    return oldest <= (int(found[1]), int(found[2])) <= newest
