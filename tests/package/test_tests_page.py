"""The table of real tests is true: each test that it names runs in `make test`."""

from __future__ import annotations

import ast
import re

import pytest

from places import TESTS

ROWS = re.findall(r"^\| ([^|]+) \| ([^|]*) \|", (TESTS / "README.md").read_text(), re.M)
NAMED = sorted({test for _, cell in ROWS for test in re.findall(r"`([^`]+)`", cell)})


def test_each_fault_has_a_real_test():
    faults = {
        fault: cell
        for fault, cell in ROWS
        if "---" not in fault and fault != "fault or promise"
    }
    assert len(faults) > 40
    assert [fault for fault, cell in faults.items() if "::test_" not in cell] == []


@pytest.mark.parametrize("named", NAMED)
def test_it_is_there_and_not_left_to_the_soak_tests(named):
    file, _, name = named.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    (found,) = (
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    for mark in found.decorator_list:
        assert not ast.unparse(mark).startswith("pytest.mark.soak")
