"""TensorBoard's page on what `ScalingTensorBoard` has written, in a real browser."""

import itertools
import re

import pytest

from browser import chromium, need_browser, tensorboard, tensorboard_python
from kerasdist.callbacks import summaries
from kerasdist.callbacks.bottleneck import judge, to_markdown
from kerasdist.callbacks.summaries import PHASES, Summaries, combine
from kerasdist.prediction.noise import GradientNoise
from kerasdist.strategies.measure.communication import StepTimes
from kerasdist.strategies.measure.machine import MachineUsage
from waiting import wait_until

pytestmark = pytest.mark.timeout(170)

# What TensorBoard's page is made of stands in shadow trees: this goes through them.
_FIND = """
const found = [];
const visit = node => {
  if (node.matches && node.matches(arguments[0])) found.push(node);
  if (node.shadowRoot) [...node.shadowRoot.children].forEach(visit);
  [...node.children].forEach(visit);
};
visit(document.documentElement);
return found;
"""
_CHARTS = """
const charts = [];
const visit = node => {
  if (node.localName === 'tf-custom-scalar-multi-line-chart-card') {
    const paths = [];
    const colors = [];
    let words = '';
    const inside = n => {
      if (n.localName === 'tf-card-heading' && n.shadowRoot)
        words += n.shadowRoot.textContent;
      if (n.localName === 'path' && n.classList.contains('line')) {
        paths.push(n.getAttribute('d') || '');
        colors.push(getComputedStyle(n).stroke);
      }
      if (n.shadowRoot) [...n.shadowRoot.children].forEach(inside);
      [...n.children].forEach(inside);
    };
    inside(node);
    charts.push([words, paths, colors]);
  }
  if (node.shadowRoot) [...node.shadowRoot.children].forEach(visit);
  [...node.children].forEach(visit);
};
visit(document.documentElement);
return charts;
"""


def write(folder):
    """A job of two workers with a slow rank, as the callback writes it.

    Returns:
        The verdict's headline, and the tag of each line.
    """
    written = Summaries(str(folder / "scaling"))
    window: list[StepTimes] = []
    for step in range(0, 200, 10):
        slow = 0.30 + 0.02 * (step % 3)
        parts = {"input": 0.02, "pack": 0.01, "update": 0.03, "outside": 0.02}
        window = [
            StepTimes(
                rank=rank,
                steps=10,
                rows=640,
                compute=compute,
                exchange=0.42 - compute,
                seconds=0.42 + sum(parts.values()),
                sent=4e7,
                communicating=0.05,
                **parts,
            )
            for rank, compute in enumerate((0.12, slow))
        ]
        figures = combine(
            window,
            link=1.1e9,
            baseline=2000.0,
            staleness={0: 5, 1: 3, 2: 1 + step % 2},
            idle=(0.2, 0.3 + step / 1000),
            noise=GradientNoise(gradient=1.0, variance=100.0 + step),
            machines={
                rank: MachineUsage(10, 7.5 + step / 100, 8, 3e9, 0.5, gpus=2, gpu=19)
                for rank in range(2)
            },
        )
        assert figures is not None
        numbers = summaries.scalars(figures, 0.1 - step / 4000)
        texts = {"events": "- rank 3 was lost"} if step == 100 else {}
        written.write(step, numbers, texts, figures.staleness)
    figures = combine(window, link=1.1e9, baseline=2000.0)
    assert figures is not None
    verdict = judge(figures)
    written.write(200, {}, {summaries.VERDICT: to_markdown(figures, verdict)})
    written.close()
    return verdict.headline, [tag for tags in numbers.values() for tag in tags]


def lines(paths, colors):
    """The colors of a chart's lines, which have most of the 20 points in the files."""
    return {
        color
        for path, color in zip(paths, colors, strict=True)
        if path.count("L") >= 10
    }


def test_each_tag_is_in_one_chart(tmp_path):
    _, tags = write(tmp_path)
    patterns = [tag for c in summaries.CHARTS.values() for tag in c.values()]
    for tag in tags:
        assert sum(bool(re.fullmatch(pattern, tag)) for pattern in patterns) == 1, tag


def test_the_page_shows_every_chart_and_the_verdict(tmp_path):
    need_browser()
    logs = tmp_path / "logs"
    headline, tags = write(logs)
    # How many lines are in each chart.
    expected = {
        title: sum(bool(re.fullmatch(tag, found)) for found in tags)
        for charts in summaries.CHARTS.values()
        for title, tag in charts.items()
    }
    assert expected["Seconds of its parts"] == len(PHASES)
    python = tensorboard_python()
    with tensorboard(logs, python) as address, chromium(tmp_path) as driver:
        driver.get(f"{address}#custom_scalars")
        looks = itertools.count(1)

        def ready():
            if not next(looks) % 20:
                driver.refresh()  # a chart whose request has failed isn't drawn again
            found = driver.execute_script(_CHARTS)
            return len(found) == len(expected) and all(
                len(lines(*drawn)) >= count
                for (_, *drawn), count in zip(found, expected.values(), strict=True)
            )

        wait_until(ready, "lines in all charts", 90, every=2)  # looking takes long
        found = driver.execute_script(_CHARTS)
        for (title, count), (text, *drawn) in zip(expected.items(), found, strict=True):
            assert title in text
            # Each line has a color of its own: they can be told apart.
            assert len(lines(*drawn)) == count, title

        driver.get("about:blank")
        driver.get(f"{address}#text")

        def told():
            parts = driver.execute_script(_FIND, "tf-markdown-view, .step-value-pair")
            words = "\n".join(
                driver.execute_script(
                    "return (arguments[0].shadowRoot||arguments[0]).textContent", part
                )
                for part in parts
            )
            return headline in words and "rank 3 was lost" in words

        wait_until(told, "the verdict", 90, every=1)
