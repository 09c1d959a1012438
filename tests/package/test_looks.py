"""Tests and benchmarks look at the library from outside: few use its private names.

A look is a private name of the library in an import, in `setattr` or the like, or
behind a dot that is not of `self` or `super()`, in the scripts of workers, too. Such a
test breaks when code is changed that does the same as before. `MOST` may only become
less: give a class a public attribute or an argument if a test needs one.
"""

import re

from places import ROOT

# The looks that remain, by file.
MOST = {
    "benchmarks/board_cost/player.py": 4,
    "tests/callbacks/timeline/test_timeline.py": 1,
    "tests/strategies/measure/test_counters.py": 1,
}
MADE = re.compile(r"(?:\bdef |\bclass |\bself\.)(_[a-zA-Z]\w*)|^(_[A-Z]\w*)", re.M)
LOOK = re.compile(
    r"(?<!\bself)(?<!\bcls)(?<!\bsuper\(\))(?<!\bkerasdist)\.(_[a-zA-Z]\w*)"
    r"|attr\([^\n]*[\"'](_[a-zA-Z]\w*)[\"']"
    r"|\bimport [^\n]*(?<![.\w])(_[a-zA-Z]\w*)"
)


def names(pattern, text):
    return ["".join(groups) for groups in pattern.findall(text)]


def looks(text, private):
    return [name for name in names(LOOK, text) if name in private]


def test_looks_are_found():
    private = set(names(MADE, "_MOST = 3\nclass A:\n    def _b(self): self._c = 1\n"))
    assert private == {"_MOST", "_b", "_c"}
    text = """
        from kerasdist.transport import _b
        thing._c._b(); os._exit(1); self._c
        monkeypatch.setattr(module, "_MOST", 3)
    """
    assert looks(text, private) == ["_b", "_c", "_b", "_MOST"]


def test_private_names_of_the_library_are_used_in_no_more_places():
    private = {
        name
        for folder in ("kerasdist", "callbacks")
        for path in (ROOT / folder).rglob("*.py")
        for name in names(MADE, path.read_text())
    }
    found = {
        str(path.relative_to(ROOT)): looks(path.read_text(), private)
        for folder in ("tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "test_looks.py"
    }
    more = {file: used for file, used in found.items() if len(used) > MOST.get(file, 0)}
    assert not more, f"Look at the public surface, see the docstring: {more}"
