import ast
import re

from places import TESTS

PAGE = (TESTS / "README.md").read_text()
ROWS = re.findall(r"^\| (.+) \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
NAMED = sorted({test for _, cell, _ in ROWS for test in re.findall(r"`([^`]+)`", cell)})


def test_each_fault_has_a_real_test():
    faults = {
        fault: cell
        for fault, cell, _ in ROWS
        if "---" not in fault and fault != "fault or promise"
    }
    assert len(faults) > 40
    assert [fault for fault, cell in faults.items() if "::test_" not in cell] == []


def test_they_are_there_and_not_left_to_the_soak_tests():
    for named in NAMED:
        file, _, name = named.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        found = [node for node in tree.body if getattr(node, "name", None) == name]
        assert len(found) == 1, named
        marks = [ast.unparse(mark) for mark in found[0].decorator_list]
        assert not any(m.startswith("pytest.mark.soak") for m in marks), named
    beside = re.findall(r"`([\w/]+/test_\w+\.py)", "".join(row[2] for row in ROWS))
    assert [file for file in beside if not (TESTS / file).exists()] == []
