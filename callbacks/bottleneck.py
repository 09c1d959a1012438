"""The bottleneck of a job, in words: a pure function of its figures.

A part of each step is lost to each of these; the largest part is the limit, if it's
large enough to be worth a change:

    straggler   all others wait for one worker
    input       the next batch isn't there
    network     the bytes take as long as the link needs for them
    batch       a step is too short: costs that don't depend on the batch size (round
                trips, calls) are a large part of it
    stages      devices of one model wait for each other
    compute     none of these: the devices are busy, as they should be
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Sequence
from typing import Any

from kerasdist.callbacks.summaries import Figures
from kerasdist.placement.plan import human_bytes
from kerasdist.strategies.measure.machine import MachineUsage

# The report of a whole `fit`: its figures and verdict, as markdown and as text.

# More ranks aren't listed one by one.
_MOST_RANKS = 8


def to_markdown(figures: Figures, verdict: Verdict) -> str:
    """Return the report as TensorBoard's text tab shows it."""
    rows = [f"| {name} | {value} |" for name, value in _table(figures)]
    table = "\n".join(["| figure | value |", "| --- | --- |", *rows])
    parts = "\n".join(
        f"| {phase} | {in_seconds(seconds)} | {figures.share(phase):.1%} |"
        for phase, seconds in _parts(figures)
    )
    split = f"| part of a step | seconds | share |\n| --- | --- | --- |\n{parts}"
    return f"{verdict.to_markdown()}\n\n{table}\n\n{split}\n"


def to_text(figures: Figures, verdict: Verdict) -> str:
    """Return the report as it is printed at the end of `fit`."""
    lines = ["kerasdist: how this job scales"]
    table = _table(figures)
    width = max(len(name) for name, _ in table)
    lines += [f"  {name:<{width}}  {value}" for name, value in table]
    lines.append("  a step:")
    for phase, seconds in _parts(figures):
        share = figures.share(phase)
        bar = "#" * round(40 * share)
        line = f"    {phase:<12}{in_seconds(seconds):>9} {share:>6.1%} {bar}"
        lines.append(line.rstrip())
    lines.append(verdict.to_text())
    return "\n".join(lines)


def _parts(figures: Figures) -> list[tuple[str, float]]:
    """Return the parts of a step; for one worker without those of communication."""
    between = ("pack", "communicate", "wait")
    alone = figures.workers == 1 and figures.share(*between) < 0.005
    return [
        (phase, seconds)
        for phase, seconds in figures.phases.items()
        if not (alone and phase in between)
    ]


def _by_rank(figures: Figures) -> str:
    """Return the speed of each worker; of many, that of the slowest and fastest."""
    speeds = figures.by_rank
    if len(speeds) < 2:
        return ""
    ranks = sorted(speeds)
    if len(ranks) <= _MOST_RANKS:
        return f" ({', '.join(f'rank {rank} {speeds[rank]:,.0f}' for rank in ranks)})"
    low = min(ranks, key=lambda rank: speeds[rank])
    high = max(ranks, key=lambda rank: speeds[rank])
    return f" (rank {low} {speeds[low]:,.0f} to rank {high} {speeds[high]:,.0f})"


def _table(figures: Figures) -> list[tuple[str, str]]:
    """Return the figures that are known: their names, and values in words."""
    f = figures
    size = human_bytes(f.bytes_per_step)
    sent = moved = ""
    if f.workers > 1:
        link = "" if f.link is None else f" of {human_bytes(f.link)}/s"
        sent = f"{size} per step, at {human_bytes(f.bandwidth)}/s{link}"
    elif f.bytes_per_step:
        moved = f"{size} per step"
    known = {
        "workers": str(f.workers),
        "global batch": f"{f.global_batch:,.0f}",
        "examples/s": f"{f.examples_per_second:,.0f}{_by_rank(f)}",
        "scaling efficiency": f.efficiency is not None
        and f"{f.efficiency:.0%} of {f.alone} x {f.baseline:,.0f} examples/s",
        "step": in_seconds(f.step_seconds),
        "slowest worker": f.slowest is not None
        and f"rank {f.slowest}, {in_seconds(f.lag)} per step behind",
        "sent by a worker": sent,
        "moved between devices": moved,
        "staleness": f.mean_staleness is not None
        and f"mean {f.mean_staleness:.1f} steps, at most {max(f.staleness)}",
        "stages idle": ", ".join(f"{share:.0%}" for share in f.idle),
        "cores": f.busy_cores is not None
        and f"{f.busy_cores:.1f} of {f.cores:.0f} busy, mean over the workers",
        "memory": f.busy_cores is not None
        and f"{human_bytes(max(one.memory for one in f.machines.values()))}, the "
        "largest of a worker",
    }
    return [(name, value) for name, value in known.items() if value]


# A limit that costs a smaller part of the step isn't worth a change.
LEAST = 0.15
# The time that a call may take before its first step begins.
_CALL_SECONDS = 0.001
# From this part of the link's speed on the link is the limit, not latencies.
_NEAR_LINK = 0.4
_SCALES = 0.9
# A worker more that adds less than this part of the first one's progress hardly pays.
_PAYS = 0.3
# A host swaps if it moves more bytes per second than this.
_SWAPS = 1 << 20
_FULL = 0.95  # of its memory
# The last batch of an epoch may be small.
_OTHER_ROWS = 0.1
# With fewer busy cores than this one core does the work, or none.
_ONE_CORE, _NO_CORE = 1.5, 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The limit of a job, with reasons and remedies.

    Attributes:
        limit: "input", "compute", "network", "straggler", "batch" or "stages".
        headline: One sentence.
        because: The figures that show it, a sentence each.
        change: The changes to make, the most important one first.
    """

    limit: str
    headline: str
    because: Sequence[str]
    change: Sequence[str]

    def to_markdown(self) -> str:
        """Return it as TensorBoard's text tab shows it."""
        lines = [f"### {self.headline}", "", "**The figures that show it**", ""]
        lines += [f"- {reason}" for reason in self.because]
        lines += ["", "**What to change first**", ""]
        lines += [f"{n}. {change}" for n, change in enumerate(self.change, 1)]
        return "\n".join(lines)

    def to_text(self) -> str:
        """Return it as a terminal shows it."""
        lines = [self.headline, *(f"  - {reason}" for reason in self.because)]
        lines += [f"  {n}. {change}" for n, change in enumerate(self.change, 1)]
        return "\n".join(lines).replace("`", "")


def judge(figures: Figures) -> Verdict:
    """Return the limit of the job that has these figures."""
    lost = _lost(figures)
    limit = max(lost, key=lambda name: lost[name])
    if lost[limit] < LEAST:
        limit = "compute"
    because, change = _say(limit, figures)
    others = [
        f"{_NAMES[name]} ({lost[name]:.0%} of a step)"
        for name in sorted(lost, key=lambda name: -lost[name])
        if name != limit and lost[name] >= LEAST
    ]
    if others:
        because.append(f"The next largest: {' and '.join(others)}.")
    headline = f"This job is limited by {_NAMES[limit]}"
    if limit == "straggler":
        headline += f": rank {figures.slowest}"
    elif limit in lost:
        headline += f": {lost[limit]:.0%} of each step is lost to it"
    return Verdict(limit=limit, headline=f"{headline}.", because=because, change=change)


def _lost(figures: Figures) -> dict[str, float]:
    """Return the part of a step that is lost to each limit, 0 to 1."""
    step = figures.step_seconds or 1.0
    # The others wait for as long as one worker lags.
    straggler = figures.lag / step if figures.workers > 1 else 0.0
    if not figures.in_step:
        # Workers only wait because of `max_staleness`.
        straggler = min(straggler, figures.share("wait"))
    lagging = figures.slow_part if straggler >= LEAST else ""
    traffic = figures.share("pack", "communicate")
    # A call takes some time before its first step begins, whatever the data. In the
    # figures that is a part of waiting for the first batch.
    calling = min(figures.phases["input"], _CALL_SECONDS) / step
    small = figures.share("outside") + calling
    speed, link = figures.bandwidth, figures.link
    if speed and (link is None or speed >= _NEAR_LINK * link):
        network = traffic
    else:
        network, small = 0.0, small + traffic
    waiting = figures.share("input") - calling
    if straggler < LEAST and figures.in_step:
        # All wait for each other in turn: for the one whose data are late just then, or
        # because steps are short.
        if waiting > small:
            waiting += figures.share("wait")
        else:
            small += figures.share("wait")
    if lagging == "input":
        waiting -= figures.lag / figures.workers / step
    return {
        "straggler": straggler,
        "input": max(waiting, 0.0),
        "network": network,
        "batch": small,
        "stages": sum(_waits(figures)),
    }


def _waits(figures: Figures) -> tuple[float, float]:
    """Return the mean parts of a step in which stages wait for each other, 0 to 1.

    The first part is due to the stage that takes longest; the second to the pipeline:
    the wait that remains if all stages take as long as that one.
    """
    if len(figures.idle) < 2:
        return 0.0, 0.0
    busy = [1 - share for share in figures.idle]
    mean = sum(busy) / len(busy)
    computing = figures.share("compute", "update")
    return max(busy) - mean, max(computing - max(busy), 0.0)


# The limits in words.

_NAMES = {
    "input": "input",
    "compute": "compute",
    "network": "the network",
    "straggler": "a straggler",
    "batch": "too small a batch",
    "stages": "stages that wait for each other",
}
# Of each limit the sentences that show it, "-", and the changes to make, "+", the most
# important one first. Those with conditions in brackets are for the jobs that meet all
# of them, see `_is`. The names in braces are those of `_words`; `f` has the figures.
# Work between steps isn't the machine's: no other machine helps against it.
_SENTENCES = {
    "straggler": """
- Rank {f.slowest} works {busiest!t} of each step, the fastest worker {fastest!t}. It
  lags {f.lag!t} behind the others, mostly while {slow_while}.
- A worker waits {f.phases[wait]!t} in a step for others, {wait_share:.0%} of it.
- [slow to compute, its machine known] Rank {f.slowest} keeps {rank_busy:.1f} of its
  {rank_cores:.0f} cores busy, all workers {f.busy_cores:.1f} on average.
+ [slow to read] Look at how rank {f.slowest} reads its data: its disk, its network, the
  number of its cores{own_data}
+ [slow between steps] Look for work that only rank {f.slowest} does after each batch: a
  callback that writes, prints or evaluates. Let it do so once in an epoch, or in a
  thread of its own.
+ [slow to compute] Look at rank {f.slowest}'s machine: other processes there, its cores
  (`kerasdist run` binds workers to cores of their own), heat, memory.
+ [not slow between steps, in step] If that can't be corrected, leave that machine out,
  or use `ParameterServerStrategy("async")`, where no worker waits for it.
+ [not slow between steps, not in step] A larger `max_staleness` lets the others run
  further ahead.
""",
    "input": """
- A worker waits {f.phases[input]!t} in each step for its next batch, and computes
  {f.phases[compute]!t}.
- [one core works] {f.busy_cores:.1f} of a worker's {f.cores:.0f} cores are busy: about
  one core prepares the data.
- [no core works] {f.busy_cores:.1f} of a worker's {f.cores:.0f} cores are busy: the
  data are awaited, from a disk ({disk!b}/s) or a network, not computed.
+ [given arrays] Use a larger `batch_size`: the rows of each batch are taken out of the
  arrays, which costs nearly the same for a few rows as for more.
+ [given arrays] Give `fit` arrays that are in memory, and of the dtype that the model
  computes with: `numpy.memmap` and HDF5 are read from disk in each step.
+ [not given arrays] Read ahead and in parallel: `dataset.map(f,
  num_parallel_calls=tf.data.AUTOTUNE)...prefetch(tf.data.AUTOTUNE)`, `cache()` for data
  that fit into memory; more `workers` of a `PyDataset`.
+ [not given arrays] Let each worker read its own files only:
  `options.experimental_distribute.auto_shard_policy =
  tf.data.experimental.AutoShardPolicy.FILE`.
""",
    "network": """
- {f.bytes_per_step!b} per step and worker take {traffic!t} that no computation hides.
- [not link known] They are sent at {f.bandwidth!b}/s, and the speed of the idle link
  wasn't measured.
- [link known] They are sent at {f.bandwidth!b}/s, of {f.link!b}/s that were measured on
  the idle link.
+ Send less often: a larger `batch_size`, or `gradient_accumulation_steps` of the
  optimizer, which exchanges once in as many steps.
+ [in step] Send less: `compression="bf16"` halves the bytes of float32 gradients.
+ [not in step] More parameter servers (`--ps`) share the traffic; for large embeddings
  use `SGD` or `Adagrad`, with which only updated rows are sent.
""",
    "batch": """
- A step takes {f.step_seconds!t}, of which a worker computes {f.phases[compute]!t} on
  {f.samples:.0f} samples; {fixed!t} are costs of a step that don't depend on the batch
  size.
- [sent over a known link] It isn't the link: {f.bandwidth!b}/s of {f.link!b}/s are used
  while workers communicate.
+ [larger batch pays] Use a larger `batch_size`
  (`kerasdist.callbacks.ScaleLearningRate` adapts the learning rate).
+ [much Python] Take several steps at once, `model.compile(steps_per_execution=10)`, and
  do less in your callbacks after each batch: {f.phases[outside]!t} of a step is spent
  in Python.
+ [several workers] Use fewer workers for a model this small.
""",
    "stages": """
- Stages are busy in a part of each step: {stages}.
- {unequal:.0%} of a step is lost because stage {slowest_stage} takes longest,
  {bubble:.0%} because a pipeline has to fill and to drain.
+ Move layers from stage {slowest_stage}, the slowest, to others, first to stage
  {fastest_stage}: `kerasdist.plan`, or `placement='auto'`, cuts a model into stages
  that take equally long.
+ More micro-batches: twice as many nearly halve the pipeline's cost (with
  `micro_batches={parts}` it's {refilled:.0%} of a step, if stages take equally long);
  and a larger `batch_size`, if they get too small.
""",
    "compute": """
- {computing:.0%} of each step is computing and updating.
- [machines known] A worker keeps {f.busy_cores:.1f} of its {f.cores:.0f} cores busy.
- [slower than alone] Each worker computes slower than one alone: workers share cores or
  memory, or each one's part of a batch is small.
+ [slower than alone] Give each worker cores of its own (`kerasdist run` does so), at
  most as many workers as there are cores to spare, or a larger `batch_size`.
+ [larger batch pays] More workers make it faster; so do faster devices,
  `mixed_precision`, or a smaller model.
+ [not larger batch pays] Faster devices, `mixed_precision`, or a smaller model make
  it faster; more workers hardly do.
""",
}
# Those of each limit: before its own, and after them.
_FIRST = """
- [a host swaps] Rank {swapping} swaps: its host moves {swapped!b}/s to and from swap.
- [a host is full] The host of rank {full} uses {full_part:.0%} of its memory.
+ [a host swaps] Use a smaller `batch_size`, fewer workers on the host of rank
  {swapping}, or more memory there: swap is slower by orders of magnitude.
"""
_ALWAYS = """
- [predicted] A step takes {f.step_seconds!t}, {off} than the {f.predicted.step_s!t}
  that were predicted ({f.predicted.low!t} to {f.predicted.high!t}).
- [predicted for other rows] The prediction was for {f.predicted_rows:.0f} samples of a
  worker in each step; here they are {f.samples:.0f}.
- [GPUs] GPUs are busy {gpu:.0%} of the time.
- [efficiency unknown] The scaling efficiency isn't known without the speed of one
  {one}: give `baseline=` examples per second, or `calibrate=True`.
- [efficiency known] {f.examples_per_second:,.0f} examples/s are {f.efficiency:.0%} of
  {times}the speed of one {one} ({f.baseline:,.0f}).
- [noise known] The gradient noise scale is {f.noise.scale:,.0f} samples, and a global
  batch has {f.global_batch:,.0f}: one worker more adds {f.next_worker:.0%} of the
  progress of the first.
+ [not larger batch pays] This batch is past the useful size: fewer workers, or a
  smaller `batch_size` of each, train nearly as far per step.
"""
_SENTENCE = re.compile(r"^([-+]) (?:\[([^]]+)\] )?(.+(?:\n  .+)*)", re.MULTILINE)
_HIDES = (
    "; `prefetch` and `map(..., num_parallel_calls=tf.data.AUTOTUNE)` hide some of it."
)
_WHILE = {
    "input": "waiting for its data",
    "compute": "computing",
    "pack": "packing its gradients",
    "update": "updating its weights",
    "outside": "between its steps (callbacks, Python)",
}


class _Sentence(string.Formatter):
    """Fills in numbers, of which `!t` is a time and `!b` a number of bytes."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """See `string.Formatter.convert_field`."""
        units = {"t": in_seconds, "b": human_bytes}
        return units[conversion](value) if conversion else value


def _say(limit: str, figures: Figures) -> tuple[list[str], list[str]]:
    """Return the sentences that show a limit, and those on what to change."""
    said: dict[str, list[str]] = {"-": [], "+": []}
    words, fits = _words(figures), _is(figures)
    for kind, conditions, sentence in _SENTENCE.findall(
        _FIRST + _SENTENCES[limit] + _ALWAYS
    ):
        needed = conditions.split(", ") if conditions else ()
        if all(
            fits[each.removeprefix("not ")] != (each[:4] == "not ") for each in needed
        ):
            text = " ".join(sentence.split())
            said[kind].append(_Sentence().format(text, f=figures, **words))
    if limit == "stages" and words["unequal"] < words["bubble"]:
        said["+"].reverse()  # the change for what costs most is the first
    return said["-"], said["+"]


def _is(figures: Figures) -> dict[str, bool]:
    """Return which conditions of sentences a job meets."""
    f = figures
    reads, between = f.slow_part == "input", f.slow_part == "outside"
    busy, several = f.busy_cores, f.cores >= 2
    every = f.machines.values()
    swaps = any(one.per_second("swapped") > _SWAPS for one in every)
    return {
        "a host swaps": swaps,
        "a host is full": not swaps and any(one.host_memory > _FULL for one in every),
        "GPUs": any(one.gpus for one in every),
        "machines known": busy is not None,
        "one core works": several and busy is not None and _NO_CORE < busy < _ONE_CORE,
        "no core works": several and busy is not None and busy <= _NO_CORE,
        "its machine known": f.slowest in f.machines,
        "slow to read": reads,
        "slow between steps": between,
        "slow to compute": not reads and not between,
        "given arrays": f.arrays,
        "link known": f.link is not None,
        "sent over a known link": bool(f.bandwidth and f.link),
        "in step": f.in_step,
        "much Python": f.share("outside") >= LEAST,
        "several workers": f.workers > 1,
        "slower than alone": f.workers > 1
        and f.efficiency is not None
        and f.efficiency < _SCALES,
        "efficiency unknown": f.efficiency is None and f.alone > 1,
        "efficiency known": f.efficiency is not None,
        "noise known": f.noise is not None,
        "predicted": f.predicted is not None,
        "predicted for other rows": f.predicted is not None
        and abs(f.predicted_rows / max(f.samples, 1e-9) - 1) > _OTHER_ROWS,
        "larger batch pays": f.next_worker is None or f.next_worker >= _PAYS,
    }


def _words_of_machines(figures: Figures) -> dict[str, Any]:
    """Return what sentences name of the workers' machines."""
    used = figures.machines or {0: MachineUsage()}
    every = used.values()
    swapping = max(used, key=lambda rank: used[rank].per_second("swapped"))
    full = max(used, key=lambda rank: used[rank].host_memory)
    gpus = sum(one.per_second("gpu") for one in every)
    slowest = used.get(-1 if figures.slowest is None else figures.slowest)
    slowest = slowest or MachineUsage()
    return {
        "swapping": swapping,
        "swapped": used[swapping].per_second("swapped"),
        "full": full,
        "full_part": used[full].host_memory,
        "gpu": gpus / max(sum(one.gpus for one in every), 1.0),
        "rank_busy": slowest.per_second("cpu"),
        "rank_cores": slowest.cores,
        "disk": max(one.per_second("disk") for one in every),
    }


def _words(figures: Figures) -> dict[str, Any]:
    """Return what sentences name beside figures."""
    f, parts = figures, figures.phases
    fixed = ("pack", "communicate", "wait", "outside")
    stages = [1 - share for share in f.idle] or [0.0]
    unequal, bubble = _waits(f)
    off = f.step_seconds / f.predicted.step_s - 1 if f.predicted else 0.0
    return {
        **_words_of_machines(f),
        "off": f"{abs(off):.0%} {'longer' if off > 0 else 'shorter'}",
        "traffic": parts["pack"] + parts["communicate"],
        "fixed": sum(parts[phase] for phase in fixed),
        "wait_share": f.share("wait"),
        "computing": f.share("compute", "update"),
        "busiest": 0.0 if f.slowest is None else f.busy[f.slowest],
        "fastest": min(f.busy.values()),
        "slow_while": _WHILE.get(f.slow_part, ""),
        "own_data": ", its memory." if f.arrays else _HIDES,
        "stages": ", ".join(f"stage {n} {share:.0%}" for n, share in enumerate(stages)),
        "unequal": unequal,
        "bubble": bubble,
        "slowest_stage": stages.index(max(stages)),
        "fastest_stage": stages.index(min(stages)),
        "parts": 4 * len(stages),
        "refilled": (len(stages) - 1) / (5 * len(stages) - 1),
        "times": f"{f.alone} times " if f.alone > 1 else "",
        "one": "worker" if f.devices == 1 else "device",
    }


def in_seconds(seconds: float) -> str:
    """Return a time as text with a fitting unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"
