"""Docstrings and messages of the library are in plain technical English.

A first line is a noun phrase (modules, classes) or a verb (functions), no clause
("What ...", "How ..."). Processes aren't persons: they don't say, hear or blame.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from places import ROOT

PACKAGES = ("kerasdist", "callbacks")
# No docstring begins with one of these.
CLAUSES = {
    *("What", "How", "Who", "Which", "Where", "When", "That"),
    *("By", "From", "Do", "Can"),
}
BANNED = re.compile(
    r"\b(whoever|nobody|somebody|anybody|everybody|anew|needn't|isn't due|so many"
    r"|for want|as ever|(?:has|have|had) come|comes|hears|says|(?:is|are) told"
    # Not an attribute of that name.
    r"|blame[sd]?(?!:))\b",
    re.IGNORECASE,
)


def faults_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the fault of each docstring or message."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            text = ast.get_docstring(node)
            if text is None:
                continue
            docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
            line = node.body[0].lineno
            if re.split(r"\W", text, maxsplit=1)[0] in CLAUSES:
                yield line, f"begins with a clause: {text.splitlines()[0]}"
            for number, each in enumerate(text.splitlines()):
                if BANNED.search(each):
                    yield line + number, each.strip()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            # A message has words; keys of requests haven't.
            and " " in node.value
            and BANNED.search(node.value)
        ):
            yield node.lineno, node.value


def test_the_english_of_the_library():
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    faults = [
        f"{file.relative_to(ROOT)}:{line}: {what}"
        for file in files
        for line, what in faults_of(file.read_text(encoding="utf-8"))
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('"""What a module does."""', "begins with a clause: What a module does."),
        (
            'def f():\n    """Wait.\n\n    Nobody waits.\n    """',
            "Nobody waits.",
        ),
        ('raise ValueError(f"the server says {x}")', "the server says "),
    ],
)
def test_a_fault_is_found(source, fault):
    ((_, found),) = faults_of(source)
    assert found == fault


def test_keys_and_other_words_are_none():
    assert list(faults_of('"""Whatever."""\nx = {"blames": "comes"}')) == []
