import sys

import pytest

from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import fill_pages


def test_pages_have_the_figures_of_the_benchmarks():
    for page in fill_pages.pages():
        text = page.read_text("utf-8")
        assert fill_pages.filled(text) == text, f"{page}: run `make figures`."
        assert list(fill_pages.unmarked(text)) == [], (
            f"{page}: a measured figure has its source behind it: see fill_pages.py."
        )


@pytest.mark.parametrize(
    "text",
    [
        "It makes 64 steps/s.",
        "TLS passes 625 MB/s here.",
        "It takes 5.3 times as long.",
        "| ring | 12,119 |",
        "| ring | 7.1 % |",
    ],
)
def test_a_figure_needs_a_source(text):
    assert len(list(fill_pages.unmarked(text))) == 1
    figure = next(fill_pages.unmarked(text))[1]
    number = figure.split()[0]
    given = text.replace(figure, f"{figure}<!-- given -->")
    marked = text.replace(number, f"{number}<!-- fit; mlp; plain; examples/s -->")
    assert list(fill_pages.unmarked(given)) == []
    assert list(fill_pages.unmarked(marked)) == []


OUTPUT = """\
load before  2.71 3.25 3.20

later than one plain process: 0.57 s (at most 1.50 s: reached)

mlp

|             | examples/s | ms/step       |
| ----------- | ---------: | ------------- |
| plain       |       7268 | 17.61         |
| two workers |      12119 | 21.12 (0.86)  |

cnn

|             | examples/s | ms/step       |
| two workers |      15262 | 8.39 (0.90)   |
"""


def test_figures_are_filled_in(tmp_path, monkeypatch):
    folder = tmp_path / "benchmarks" / "fit"
    folder.mkdir(parents=True)
    (folder / "output.txt").write_text(OUTPUT)
    (folder / "more.txt").write_text(OUTPUT.replace("7268", "7000"))
    monkeypatch.setattr(fill_pages, "ROOT", tmp_path)
    page = (
        "It makes 9.9<!-- fit; mlp; plain; examples/s --> examples,\n"
        "or 9 <!-- fit/more; mlp; plain; examples/s --> and 0.5 s"
        "<!-- fit; later than one plain -->.\n"
        "0.00<!-- fit; mlp; two workers; ms/step #2 --> of it.\n"
        "| a | 1 | 2.0 <!-- fit; {mlp; cnn}; two workers; examples/s --> |\n"
    )
    lines = fill_pages.filled(page).splitlines()
    assert lines == [
        "It makes 7,268.0<!-- fit; mlp; plain; examples/s --> examples,",
        "or 7,000 <!-- fit/more; mlp; plain; examples/s --> and 0.6 s"
        "<!-- fit; later than one plain -->.",
        "0.86<!-- fit; mlp; two workers; ms/step #2 --> of it.",
        "| a | 12,119 | 15,262.0 <!-- fit; {mlp; cnn}; two workers; examples/s --> |",
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing; mlp; plain; examples/s", "No file for the figure 'nothing; mlp"),
        ("fit; none; plain; examples/s", "fit/output.txt has no figure 'fit; none"),
        ("fit; {mlp; cnn}; plain; examples/s", "More sources than figures"),
    ],
)
def test_a_source_that_is_not_there_is_an_error(source, message):
    with pytest.raises(ValueError, match=message):
        fill_pages.filled(f"1.0<!-- {source} -->")
