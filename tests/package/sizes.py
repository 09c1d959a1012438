"""How large the library is: `make size` prints it.

A line of code is one that is neither empty nor a comment nor part of a docstring.
"""

from __future__ import annotations

import ast
import statistics
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kerasdist", "callbacks")
# A module of fewer lines of code is a small one, unless it's a package's `__init__`.
SMALL = 40


@dataclass(frozen=True)
class Size:
    """The size of a module.

    Attributes:
        path: The file, from the root.
        lines: All lines.
        code: Lines of code.
    """

    path: Path
    lines: int
    code: int

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def size_of(path: Path) -> Size:
    text = path.read_text("utf-8")
    described: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            described.update(range(first.lineno, (first.end_lineno or 0) + 1))
    lines = text.splitlines()
    code = sum(
        bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in enumerate(lines, 1)
        if number not in described
    )
    return Size(path.relative_to(ROOT), len(lines), code)


def sizes() -> list[Size]:
    """The size of each module of the library, the smallest first."""
    found = [
        size_of(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    ]
    return sorted(found, key=lambda size: (size.code, size.path))


def report() -> str:
    found = sizes()
    modules = [size for size in found if not size.is_package]
    small = [size for size in modules if size.code < SMALL]
    lines = [
        f"modules                {len(found)}, {len(found) - len(modules)} of them "
        "packages' __init__",
        f"lines                  {sum(size.lines for size in found):,}",
        f"lines of code          {sum(size.code for size in found):,}",
        f"median module          {statistics.median(s.code for s in modules):g}"
        " lines of code",
        f"fewer than {SMALL} of these  {len(small)} modules",
    ]
    for title, some in (
        ("The largest", modules[:-11:-1]),
        ("The smallest", modules[:10]),
    ):
        lines += ["", f"{title}, lines and lines of code:"]
        lines += [f"{size.lines:7,} {size.code:6,}  {size.path}" for size in some]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
