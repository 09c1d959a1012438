"""What `make size` counts; no module is too large, and no name is used twice."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

import sizes

from places import ROOT

MOST_LINES = 700


def test_lines_of_code_are_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(sizes, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(
        '"""Two lines\nof a docstring."""\n\n# A comment.\nX = """one\n# two\n"""\n\n'
        'def f():\n    """A docstring."""\n    return X  # a comment\n'
    )
    assert sizes.size_of(path) == sizes.Size(path.relative_to(tmp_path), 11, 4)


def test_no_module_is_too_large():
    assert [s for s in sizes.sizes() if s.lines > MOST_LINES] == []


def modules() -> Iterator[Path]:
    for folder in ("kerasdist", "callbacks"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_no_class_name_is_used_twice():
    found = collections.defaultdict(list)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_no_file_name_is_used_more_than_twice():
    counts = collections.Counter(path.name for path in modules())
    del counts["__init__.py"]
    assert [name for name, count in counts.items() if count > 2] == []
