"""How large the library is: `make size` prints it.

A line of code is one that is neither empty nor a comment nor part of a docstring.
"""

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A module of fewer lines of code is a small one, unless it's a package's `__init__`.
SMALL = 40


def lines_of_code(text: str) -> int:
    described: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            described.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in enumerate(text.splitlines(), 1)
        if number not in described
    )


def report() -> str:
    folders = (ROOT / "kerasdist", ROOT / "callbacks")
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    lines_of = {path: len(path.read_text("utf-8").splitlines()) for path in paths}
    code = {path: lines_of_code(path.read_text("utf-8")) for path in paths}
    modules = [path for path in sorted(code, key=code.get) if path.stem != "__init__"]
    median = statistics.median(code[path] for path in modules)
    lines = [
        f"modules                {len(code)}, {len(code) - len(modules)} of them "
        "packages' __init__",
        f"lines                  {sum(lines_of.values()):,}",
        f"lines of code          {sum(code.values()):,}",
        f"median module          {median:g} lines of code",
        f"fewer than {SMALL} of these  {sum(code[p] < SMALL for p in modules)} modules",
    ]
    for title, some in (("largest", modules[:-11:-1]), ("smallest", modules[:10])):
        lines += ["", f"The {title}, lines of code:"]
        lines += [f"{code[path]:6,}  {path.relative_to(ROOT)}" for path in some]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
