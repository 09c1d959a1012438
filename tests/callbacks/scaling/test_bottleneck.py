"""Figures and the words for them."""

import dataclasses
import re

import pytest

from kerasdist.callbacks import bottleneck
from kerasdist.callbacks.bottleneck import LEAST, judge
from kerasdist.callbacks.summaries import PHASES, Figures
from kerasdist.prediction.noise import GradientNoise
from kerasdist.prediction.simulation import Prediction
from kerasdist.strategies.measure.machine import MachineUsage


def figures(workers=4, *, busy=None, **more):
    """Figures of a job whose step's parts are given in milliseconds."""
    phases = {phase: more.pop(phase, 0.0) / 1e3 for phase in PHASES}
    whole = sum(phases.values())
    facts = {
        "workers": workers,
        "steps": 100.0,
        "examples_per_second": 256 / whole,
        "by_rank": {r: 256 / whole / workers for r in range(workers)},
        "step_seconds": whole,
        "phases": phases,
        "busy": busy or {r: 0.01 for r in range(workers)},
        "slowest": 2 if workers > 1 else None,
        "slow_part": "compute" if workers > 1 else "",
        "global_batch": 256.0,
        "bytes_per_step": 8e6,
        "bandwidth": 9e8,
        "link": 1e9,
    }
    return Figures(**{**facts, **more})


def machines(cores, **more):
    """Ten seconds of four workers that keep some of their eight cores busy."""
    return {rank: MachineUsage(10, 10 * cores, 8, **more) for rank in range(4)}


def predicted(seconds, rows):
    """A prediction for four workers."""
    return Prediction(
        step_s=seconds,
        low=0.9 * seconds,
        high=1.2 * seconds,
        examples_per_s=4 * rows / seconds,
        efficiency=1.0,
        limit="compute",
    )


def words(verdict):
    return " ".join([verdict.headline, *verdict.because, *verdict.change])


WAITING = {"wait": 50, "lag": 0.045, "busy": {0: 0.03, 1: 0.03, 2: 0.075, 3: 0.03}}
SLOW = {"compute": 90, "communicate": 5, "lag": 0.05, "in_step": False}
# Figures, the limit, what is said of it, and what isn't.
SAID = [
    (
        figures(compute=90, communicate=8, update=2),
        "compute",
        ["92% of each step is computing and updating.", "More workers make it faster"],
        [],
    ),
    (
        figures(compute=50, input=45, communicate=5),
        "input",
        [
            *("input: 44% of each step is lost to it", "prefetch"),
            "waits 45.0 ms in each step for its next batch",
        ],
        [],
    ),
    (
        figures(compute=50, input=45, communicate=5, arrays=True),
        "input",
        ["waits 45.0 ms in each step for its next batch", "a larger `batch_size`"],
        ["dataset", "prefetch", "PyDataset", "shard"],
    ),
    (
        figures(compute=50, communicate=45, pack=5),
        "network",
        [
            "the network: 50% of each step is lost to it",
            "8 MB per step and worker take 50.0 ms",
            "900 MB/s, of 1 GB/s that were measured on the idle link",
            *("gradient_accumulation_steps", "compression"),
        ],
        [],
    ),
    # Compression isn't for asynchronous workers.
    (
        figures(compute=50, communicate=50, in_step=False),
        "network",
        ["More parameter servers"],
        ["compression"],
    ),
    (
        figures(compute=30, input=12, **WAITING),
        "straggler",
        [
            "This job is limited by a straggler: rank 2.",
            "Rank 2 works 75.0 ms of each step, the fastest worker 30.0 ms",
            "lags 45.0 ms behind the others, mostly while computing.",
            *("Look at rank 2's machine", 'ParameterServerStrategy("async")'),
        ],
        [],
    ),
    (
        figures(compute=30, input=12, slow_part="input", **WAITING),
        "straggler",
        ["mostly while waiting for its data", "how rank 2 reads its data"],
        [],
    ),
    # The chief, mostly: its machine is as good as the others'.
    (
        figures(compute=30, outside=12, slow_part="outside", **WAITING),
        "straggler",
        [
            "between its steps (callbacks, Python)",
            "Look for work that only rank 2 does after each batch",
        ],
        ["machine"],
    ),
    # Nobody waits for a slow asynchronous worker, if there's no bound.
    (figures(**SLOW), "compute", [], []),
    (figures(**SLOW, wait=40), "straggler", ["max_staleness"], []),
    (
        figures(compute=1, communicate=3, outside=2, bandwidth=5e7),
        "batch",
        [
            "too small a batch: 83% of each step is lost to it",
            "computes 1.0 ms on 64 samples",
            "It isn't the link: 50 MB/s of 1 GB/s",
            *("batch_size", "steps_per_execution", "fewer workers"),
        ],
        [],
    ),
    # Waiting without a straggler comes of short steps, or of each other's data.
    (figures(compute=5, wait=4, communicate=1, bandwidth=1e7), "batch", [], []),
    # A millisecond before the batch is there isn't the data's.
    (figures(compute=0.5, input=0.9, outside=0.4, communicate=0.1), "batch", [], []),
    # One worker alone is told nothing of others.
    (
        figures(1, compute=9, outside=3, bandwidth=0.0, link=None),
        "batch",
        [],
        ["fewer workers", "baseline"],
    ),
    (
        figures(compute=50, communicate=50, link=None),
        "network",
        ["the speed of the idle link wasn't measured"],
        [],
    ),
    (
        figures(compute=40, input=35, communicate=25),
        "input",
        ["The next largest: the network (25% of a step)."],
        [],
    ),
    (figures(compute=100 * (1.01 - LEAST), input=100 * LEAST - 1), "compute", [], []),
    (figures(compute=100 * (0.99 - LEAST), input=100 * LEAST + 1), "input", [], []),
    (figures(compute=1e-12), "compute", [], []),
    (
        figures(compute=100, noise=GradientNoise(gradient=1, variance=64)),
        "compute",
        [
            "The gradient noise scale is 64 samples, and a global batch has 256",
            "one worker more adds 7% of the progress of the first",
            *("more workers hardly do", "past the useful size"),
        ],
        ["More workers make it faster"],
    ),
    (
        figures(compute=100, noise=GradientNoise(gradient=1, variance=1e5)),
        "compute",
        ["one worker more adds 99% of", "More workers make it faster"],
        ["past the useful size"],
    ),
    (
        figures(compute=90, machines=machines(7.5, gpus=1, gpu=9)),
        "compute",
        ["keeps 7.5 of its 8 cores busy.", "GPUs are busy 90% of the time."],
        ["swap", "of its memory"],
    ),
    (
        figures(compute=50, input=45, machines=machines(1.1)),
        "input",
        ["1.1 of a worker's 8 cores are busy: about one core prepares the data."],
        ["awaited", "GPUs"],
    ),
    (
        figures(compute=50, input=45, machines=machines(0.2, disk=2e7)),
        "input",
        ["are awaited, from a disk (2 MB/s) or a network"],
        ["one core"],
    ),
    (figures(compute=50, input=45, machines=machines(6)), "input", [], ["core"]),
    (
        figures(
            compute=50,
            **WAITING,
            machines=machines(6) | {2: MachineUsage(10, 20, 8, swapped=5e8)},
        ),
        "straggler",
        [
            "Rank 2 swaps: its host moves 50 MB/s to and from swap.",
            "Rank 2 keeps 2.0 of its 8 cores busy, all workers 5.0 on average.",
        ],
        ["of its memory"],
    ),
    (
        figures(compute=110, predicted=predicted(0.1, rows=64)),
        "compute",
        ["takes 110.0 ms, 10% longer than the 100.0 ms that were predicted (90.0 ms"],
        ["The prediction was for"],
    ),
    (
        figures(compute=90, predicted=predicted(0.1, rows=80), in_step=False),
        "compute",
        [
            *("10% shorter than", "for 80 samples of a worker in each step; here"),
            "they are 256",
        ],
        [],
    ),
    (
        figures(compute=50, machines=machines(6, host_memory=0.97)),
        "compute",
        ["The host of rank 0 uses 97% of its memory."],
        ["swap"],
    ),
]


@pytest.mark.parametrize(("found", "limit", "said", "unsaid"), SAID)
def test_what_is_said(found, limit, said, unsaid):
    verdict = judge(found)
    assert verdict.limit == limit
    assert verdict.headline.startswith("This job is limited by ")
    assert verdict.because
    assert verdict.change
    for sentence in [verdict.headline, *verdict.because, *verdict.change]:
        assert sentence[0].isupper() or sentence[0].isdigit()
        assert sentence[-1] == "."
    for text in said:
        assert text in words(verdict)
    for text in unsaid:
        assert text not in words(verdict)


def test_what_is_said_of_stages():
    unequal = figures(workers=1, compute=100, idle=(0.7, 0.3))
    found = judge(unequal)
    assert found.limit == "stages"
    assert "50% of each step is lost" in found.headline
    assert "stage 0 30%, stage 1 70%" in found.because[0]
    # 0.7 - 0.5, and 1 - 0.7
    assert found.because[1].startswith("20% of a step is lost because stage 1 takes lo")
    assert "30% because a pipeline" in found.because[1]
    assert "`micro_batches=8` it's 11% of a step" in found.change[0]
    assert found.change[1].startswith("Move layers from stage 1, the slowest, ")

    filled = figures(workers=1, compute=100, idle=(0.1, 0.9))
    assert judge(filled).change[0].startswith("Move layers from stage 0, the slowest")

    # They wait for data, not for each other; and one stage waits for nobody.
    for limit, phases, idle in (
        ("input", {"compute": 20, "input": 80}, (0.9, 0.9)),
        ("compute", {"compute": 100}, (0.9,)),
    ):
        assert judge(figures(workers=1, idle=idle, **phases)).limit == limit


def test_efficiency():
    base = 256 / 0.1 / 4
    good = judge(figures(compute=95, communicate=5, baseline=base))
    assert "are 100% of 4 times the speed of one worker (640)" in words(good)
    assert good.change[0].startswith("More workers")
    bad = judge(figures(compute=95, communicate=5, baseline=2 * base))
    assert bad.limit == "compute"
    assert "50% of 4 times" in words(bad)
    assert "cores of its own" in bad.change[0]
    unknown = judge(figures(compute=95, communicate=5))
    known_by = "give `baseline=` examples per second, or `calibrate=True`"
    assert f"without the speed of one worker: {known_by}" in words(unknown)
    found = figures(workers=1, compute=100, baseline=1280.0, devices=2)
    assert found.efficiency == pytest.approx(256 / 0.1 / 1280 / 2)
    assert "2 times the speed of one device (1,280)" in words(judge(found))
    placed = figures(workers=1, devices=2, compute=100)
    assert f"without the speed of one device: {known_by}" in words(judge(placed))
    assert known_by not in words(judge(dataclasses.replace(placed, devices=1)))


def test_as_a_page_and_for_a_terminal():
    found = figures(
        compute=50,
        wait=40,
        communicate=10,
        lag=0.045,
        baseline=1000.0,
        staleness={0: 5, 4: 15},
        idle=(0.25, 0.5),
    )
    verdict = judge(found)
    page = bottleneck.to_markdown(found, verdict)
    assert page.startswith(f"### {verdict.headline}\n")
    for phase in PHASES:
        assert re.search(rf"^\| {phase} \| .* \| [\d.]+% \|$", page, re.M)
    text = bottleneck.to_text(found, verdict)
    assert "`" not in text
    for line in (
        "workers             4",
        "scaling efficiency  64% of 4 x 1,000 examples/s",
        "slowest worker      rank 2, 45.0 ms per step behind",
        "sent by a worker    8 MB per step, at 900 MB/s of 1 GB/s",
        "staleness           mean 3.0 steps, at most 4",
        "stages idle         25%, 50%",
        "wait          40.0 ms  40.0% ################",
    ):
        assert line in text
    assert verdict.headline in text


def test_one_worker_and_many_have_a_shorter_page():
    found = figures(1, compute=9, outside=3, bandwidth=0.0, link=None)
    text = bottleneck.to_text(found, judge(found))
    assert re.search(r"^  examples/s +21,333$", text, re.M)
    for phase in ("pack", "communicate", "wait"):
        assert phase not in text
    # With servers it does communicate.
    found = figures(1, compute=9, communicate=3, in_step=False)
    assert "    communicate" in bottleneck.to_text(found, judge(found))
    # Many aren't named one by one.
    found = figures(64, compute=10, by_rank={r: 100.0 + r % 63 for r in range(64)})
    text = bottleneck.to_text(found, judge(found))
    assert "25,600 (rank 0 100 to rank 62 162)" in text
