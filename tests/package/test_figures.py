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


def test_figures_are_filled_in():
    page = (
        "1 KB takes 9.9<!-- tls; All-reduce; 1 KB; TLS over TCP --> times,\n"
        "and 0 ms<!-- memory_startup; first step later than one plain -->.\n"
        "0.00<!-- wire; 1 Gbit/s, 10 MB; ring, 1 worker per host #2 --> of it.\n"
        "| ring | 1 | 2.0 <!-- fit; {mlp; cnn}; two workers; examples/s --> |\n"
    )
    lines = fill_pages.filled(page).splitlines()
    figures = [line.partition("<!--")[0].strip() for line in lines]
    shown = ["1 KB takes 1.2", "and 1 ms", "0.94", "| ring | 12,119 | 15,262.0"]
    assert figures == shown


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
