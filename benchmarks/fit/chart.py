"""README's chart from output.txt: which part of the limit two workers reach.

python benchmarks/fit/chart.py
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
CHART = HERE.parent.parent / "docs" / "images" / "fit.svg"
MODELS = {"mlp": "MLP", "cnn": "CNN", "lstm": "LSTM", "embedding": "embedding"}
BARS = {
    "two workers": ("kerasdist", "#1f6feb"),
    "MultiWorkerMirroredStrategy": (
        "MultiWorkerMirroredStrategy, legacy Keras",
        "#9aa4b2",
    ),
}
LEFT, WIDTH, BAR, GAP, TOP = 100, 480, 15, 16, 40


def shares(text: str) -> dict[str, dict[str, float]]:
    """The column "of the limit" by model and row."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line in MODELS:
            rows = found[line] = {}
        elif len(cells) > 4 and cells[1] in BARS:
            rows[cells[1]] = float(cells[4])
    return found


def svg(found: dict[str, dict[str, float]]) -> str:
    group = len(BARS) * BAR + GAP
    bottom = TOP + len(MODELS) * group
    parts = []
    for i, (label, color) in enumerate(BARS.values()):
        x = LEFT + 130 * i
        parts.append(f'<rect x="{x}" y="10" width="11" height="11" fill="{color}"/>')
        parts.append(f'<text x="{x + 17}" y="20">{label}</text>')
    for part in (0, 0.25, 0.5, 0.75, 1):
        x = LEFT + WIDTH * part
        parts.append(
            f'<line x1="{x:g}" y1="{TOP - 8}" x2="{x:g}" y2="{bottom - 8}" '
            f'stroke="{"#57606a" if part == 1 else "#d0d7de"}"/>'
        )
        parts.append(
            f'<text x="{x:g}" y="{bottom + 8}" text-anchor="middle">{part:g}</text>'
        )
    for i, (model, title) in enumerate(MODELS.items()):
        y = TOP + i * group
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + BAR + 4}" text-anchor="end">{title}</text>'
        )
        for j, (row, (_, color)) in enumerate(BARS.items()):
            share, top = found[model][row], y + j * BAR
            parts.append(
                f'<rect x="{LEFT}" y="{top}" width="{WIDTH * share:g}" '
                f'height="{BAR - 3}" fill="{color}"/>'
            )
            parts.append(
                f'<text x="{LEFT + WIDTH * share + 6:g}" y="{top + 11}">'
                f"{share:.2f}</text>"
            )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 50}" '
        f'height="{bottom + 18}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    CHART.write_text(svg(shares((HERE / "output.txt").read_text("utf-8"))), "utf-8")
