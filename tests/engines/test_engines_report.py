"""`make engines` runs tests that exist, and tells what failed."""

from __future__ import annotations

import pytest
import report

from places import ROOT


@pytest.mark.parametrize("name", report.ENGINES)
def test_each_engine_has_its_tests(name: str) -> None:
    path, _, test = report.ENGINES[name].partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert f"def {test}(" in text if test else "def test_" in text


def test_a_failure_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {"a": ("ok", ""), "b": ("failed", "why"), "c": ("not found", "no c")}
    monkeypatch.setattr(report, "ENGINES", {name: name for name in outcomes})
    monkeypatch.setattr(report, "run", outcomes.__getitem__)
    assert report.main(["a", "c"]) == 0
    assert report.main([]) == 1
    assert report.main(["d"]) == 2
    out = capsys.readouterr().out
    assert out.count("ok ") == 2
    assert "why" in out
    assert "not found     0 s  no c\n" in out
