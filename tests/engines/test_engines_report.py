"""`make engines` runs tests that exist, and tells what failed."""

from __future__ import annotations

import pytest
import report

from places import ROOT


@pytest.mark.parametrize("name", report.ENGINES)
def test_each_engine_has_its_tests(name: str) -> None:
    for each in report.ENGINES[name].split():
        path, _, test = each.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {test}(" in text if test else "def test_" in text
