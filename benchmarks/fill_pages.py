"""Fill the figures of README and docs from what the benchmarks have printed.

    python benchmarks/fill_pages.py [--check]

A figure on a page is followed by a comment that names its source:

    0.86<!-- fit; mlp; two workers; of the limit -->

This is the file `benchmarks/fit/output.txt`, there the first table after a line that
begins with `mlp` (or the table whose first cell does), the row that begins with
`two workers`, and the column `of the limit`. If several first cells tell rows apart,
they stand there as `embedding: rows / 100`. The part for the line can be left out.
Instead of a table, row and column there can be the beginning of a line, whose number is
taken: `memory_startup; extra resident bytes per worker`. `#2` at the end is the second
number there. Another file of the same folder is named as `elastic/horovod_output`.

A row of a table has one comment, with the sources of its last cells in braces:

    | two workers | 12,119 | 15,262 <!-- fit; {mlp; cnn}; two workers; examples/s --> |

The figure keeps as many decimals as it has on the page. A number of this kind that was
chosen, not measured, is followed by `<!-- given -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from common.places import ROOT

__all__ = ["filled", "pages", "unmarked"]

NUMBER = r"\d[\d,]*(?:\.\d+)?"
_SOURCE = r"<!-- [\w/]+; [^>]*? -->"
_FIGURE = rf"{NUMBER}(?:\s?(?:%|[KMG]B|s|ms|steps))?\s?"
_CELLS = rf"(?:\| *{NUMBER}[^|<]*)+"
_MARKED = re.compile(rf"({_CELLS}|{_FIGURE})({_SOURCE})")
_GIVEN = re.compile(rf"{NUMBER}(?:\s\S+){{0,5}}?<!-- given -->")
# What makes a number in running text one that somebody has measured.
_UNITS = (
    r"(?:steps|examples|images|rows|samples|epochs|updates)(?:/s| per second)",
    r"(?:KB|MB|GB|MiB|GiB|kbit|Mbit|Gbit)(?:/s| per second)",
    r"(?:ms|us|µs|milliseconds|microseconds)",
    r"times (?:as|slower|faster|longer|shorter|less|more)",
    r"% (?:slower|faster|longer|shorter|less|more|of (?:a|one) (?:step|epoch|core))",
    r"(?:KB|MB|GB|MiB|GiB) (?:more|less|sent|received)",
    r"s (?:later|earlier)",
    r"of the (?:bound|limit)",
)
_MEASURED = re.compile(rf"{NUMBER}\s(?:{'|'.join(_UNITS)})\b")
# In a table: a cell that is a number with decimals or thousands, or a percentage.
_CELL = re.compile(r"\d[\d,]*\.\d+(?: ?%)?|\d[\d,]*,\d{3}|\d+ ?%")


def pages() -> list[Path]:
    """Return the pages whose figures come from benchmarks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str) -> str:
    """Return a page's text with all figures as the benchmarks have them.

    Raises:
        ValueError: A source has no such file, table, row, column or line.
    """

    return _MARKED.sub(_fill, text)


def _fill(match: re.Match[str]) -> str:
    shown, comment = match.groups()
    sources = _sources(comment.removeprefix("<!-- ").removesuffix(" -->"))
    places = list(re.finditer(rf"(?:(?<=\| )|^){NUMBER}", shown))[-len(sources) :]
    if len(places) < len(sources):
        raise ValueError(f"More sources than figures before them: {match[0]!r}")
    for place, source in reversed(list(zip(places, sources, strict=True))):
        figure = _as_shown(_look_up(source), place[0])
        shown = shown[: place.start()] + figure + shown[place.end() :]
    return shown + comment


def _sources(text: str) -> list[str]:
    """Return the source of each figure: `a; {b; c}` is that of `a; b` and `a; c`."""
    braces = re.search(r"\{(.*)\}", text)
    if braces is None:
        return [text]
    begin, end = text[: braces.start()], text[braces.end() :]
    return [f"{begin}{each}{end}" for each in braces[1].split("; ")]


def unmarked(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line's number and a measured figure in it without a source.

    Blocks of code are left out: their output is compared with what commands print.
    """
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if fenced or line.startswith("    "):
            continue
        # Away with the figures that have a source, and with code.
        rest = _GIVEN.sub("", _MARKED.sub("", line))
        rest = re.sub(r"`[^`]*`|\]\([^)]*\)", "", rest)
        found = [match[0] for match in _MEASURED.finditer(rest)]
        if line.startswith("|"):
            cells = [cell.strip() for cell in rest.split("|")]
            found += [cell for cell in cells if _CELL.fullmatch(cell)]
        yield from ((number, figure) for figure in found)


def _as_shown(value: float, shown: str) -> str:
    decimals = len(shown.partition(".")[2])
    separator = "," if value >= 1000 else ""
    return f"{value:{separator}.{decimals}f}"


def _look_up(source: str) -> float:
    place, _, index = source.partition(" #")
    name, *path = place.split("; ")
    folder, _, stem = name.partition("/")
    file = ROOT / "benchmarks" / folder / f"{stem or 'output'}.txt"
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"No file for the figure {source!r}: {error}") from error
    found = _in_line(lines, *path) if len(path) == 1 else _in_table(lines, *path)
    numbers = re.findall(NUMBER, found or "")
    if len(numbers) < int(index or 1):
        raise ValueError(f"{file.relative_to(ROOT)} has no figure {source!r}.")
    return float(numbers[int(index or 1) - 1].replace(",", ""))


def _in_line(lines: list[str], begin: str) -> str | None:
    found = [line[len(begin) :] for line in lines if line.startswith(begin)]
    return found[0] if len(found) == 1 else None


def _in_table(lines: list[str], *path: str) -> str | None:
    *section, row, column = path
    start = 0
    if section:
        begins = [line.removeprefix("| ").startswith(section[0]) for line in lines]
        starts = [i for i, begin in enumerate(begins) if begin]
        if not starts:
            return None
        start = starts[0]
    head: list[str] = []
    for line in lines[start:]:
        if not line.startswith("|"):
            if head:
                return None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not head:
            head = cells
        elif column in head and cells[: row.count(" / ") + 1] == row.split(" / "):
            return cells[head.index(column)]
    return None


def main() -> None:
    """Fill the pages; or report what would change."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    different = False
    for page in pages():
        text = page.read_text("utf-8")
        new = filled(text)
        if new == text:
            continue
        different = True
        print(f"{page.relative_to(ROOT)}: {'differs' if check else 'filled'}")
        if not check:
            page.write_text(new, "utf-8")
    sys.exit(1 if different and check else 0)


if __name__ == "__main__":
    main()
