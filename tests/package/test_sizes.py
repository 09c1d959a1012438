"""What `make size` counts, and that no module becomes too large again."""

from __future__ import annotations

import sizes

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
