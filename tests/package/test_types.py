"""The package's names are known to type checkers, and a typo is an error."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

import kerasdist
from places import ROOT

SCRIPT = """
import kerasdist

strategy = kerasdist.RingStrategy()
communicator: kerasdist.Communicator = strategy.communicator
report: kerasdist.PlacementReport = strategy.placement_report()
plan: kerasdist.Plan = kerasdist.plan(lambda: None, batch_size=4)
callback = kerasdist.callbacks.ScaleLearningRate()
kerasdist.RingStratgy()
communicator.barier()
"""


@pytest.mark.soak
def test_a_typo_is_an_error_of_mypy(tmp_path):
    """Any name was fine, because of the module's `__getattr__`."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # In the checkout's folder, for the cache that `make types` has filled.
    command = [sys.executable, "-m", "mypy", str(script)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False
    )
    found = re.findall(r'(\d+): error: .* has no attribute "(\w+)"', done.stdout)
    assert found == [("9", "RingStratgy"), ("10", "barier")], done.stdout
    assert done.stdout.count(": error: ") == 2


def test_the_stub_has_the_names_of_the_module():
    stub = ast.parse((ROOT / "kerasdist" / "__init__.pyi").read_text())
    imported = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
    assert len(imported) == len(stub.body)
    found = {}
    for each in imported:
        for alias in each.names:
            assert alias.asname == alias.name  # else it isn't a name of the stub
            found[alias.name] = each.module
    assert found.keys() == {*kerasdist.__all__, "callbacks"}
    lazy = kerasdist._LAZY
    assert {name: found[name] for name in lazy} == lazy
