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
from collections.abc import Sequence

from kerasdist.callbacks.summaries import Figures
from kerasdist.placement.plan import human_bytes

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
    rows = [
        ("workers", str(figures.workers)),
        ("global batch", f"{figures.global_batch:,.0f}"),
        ("examples/s", f"{figures.examples_per_second:,.0f}{_by_rank(figures)}"),
    ]
    if figures.efficiency is not None:
        rows.append(
            (
                "scaling efficiency",
                f"{figures.efficiency:.0%} of {figures.workers * figures.devices} x "
                f"{figures.baseline:,.0f} examples/s",
            )
        )
    rows.append(("step", in_seconds(figures.step_seconds)))
    if figures.slowest is not None:
        rows.append(
            (
                "slowest worker",
                f"rank {figures.slowest}, {in_seconds(figures.lag)} per step behind",
            )
        )
    if figures.workers > 1:
        link = "" if figures.link is None else f" of {human_bytes(figures.link)}/s"
        rows.append(
            (
                "sent by a worker",
                f"{human_bytes(figures.bytes_per_step)} per step, at "
                f"{human_bytes(figures.bandwidth)}/s{link}",
            )
        )
    elif figures.bytes_per_step:
        rows.append(
            ("moved between devices", f"{human_bytes(figures.bytes_per_step)} per step")
        )
    if figures.staleness:
        reads = sum(figures.staleness.values())
        mean = sum(lag * n for lag, n in figures.staleness.items()) / reads
        rows.append(
            ("staleness", f"mean {mean:.1f} steps, at most {max(figures.staleness)}")
        )
    if figures.idle:
        idle = ", ".join(f"{share:.0%}" for share in figures.idle)
        rows.append(("stages idle", idle))
    return rows


# A limit that costs a smaller part of the step isn't worth a change.
LEAST = 0.15
# The time that a call may take before its first step begins.
_CALL_SECONDS = 0.001
# From this part of the link's speed on the link is the limit, not latencies.
_NEAR_LINK = 0.4
_SCALES = 0.9
_NAMES = {
    "input": "input",
    "compute": "compute",
    "network": "the network",
    "straggler": "a straggler",
    "batch": "too small a batch",
    "stages": "stages that wait for each other",
}


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
    because = {
        "straggler": _straggler,
        "input": _input,
        "network": _network,
        "batch": _batch,
        "stages": _stages,
        "compute": _compute,
    }[limit]
    reasons, change = because(figures)
    reasons += _efficiency(figures)
    others = [
        name
        for name in sorted(lost, key=lambda name: -lost[name])
        if name != limit and lost[name] >= LEAST
    ]
    if others:
        named = " and ".join(
            f"{_NAMES[name]} ({lost[name]:.0%} of a step)" for name in others
        )
        reasons.append(f"The next largest: {named}.")
    headline = f"This job is limited by {_NAMES[limit]}"
    if limit == "straggler":
        headline += f": rank {figures.slowest}"
    elif limit in lost:
        headline += f": {lost[limit]:.0%} of each step is lost to it"
    return Verdict(limit=limit, headline=headline + ".", because=reasons, change=change)


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
    if _is_near_link(figures):
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


def _is_near_link(figures: Figures) -> bool:
    if not figures.bandwidth:
        return False
    return figures.link is None or figures.bandwidth >= _NEAR_LINK * figures.link


def _straggler(figures: Figures) -> tuple[list[str], list[str]]:
    rank = figures.slowest
    other = min(figures.busy.values())
    busiest = figures.busy.get(-1 if rank is None else rank, 0.0)
    what = {
        "input": "waiting for its data",
        "compute": "computing",
        "pack": "packing its gradients",
        "update": "updating its weights",
        "outside": "between its steps (callbacks, Python)",
    }[figures.slow_part]
    reasons = [
        f"Rank {rank} works {in_seconds(busiest)} of each step, the fastest worker "
        f"{in_seconds(other)}. It lags {in_seconds(figures.lag)} behind the others, "
        f"mostly while {what}.",
        f"A worker waits {in_seconds(figures.phases['wait'])} in a step for others, "
        f"{figures.share('wait'):.0%} of it.",
    ]
    if figures.slow_part == "input":
        first = (
            f"Look at how rank {rank} reads its data: its disk, its network, the "
            "number of its cores"
        )
        first += (
            ", its memory."
            if figures.arrays
            else "; `prefetch` and `map(..., num_parallel_calls=tf.data.AUTOTUNE)` "
            "hide some of it."
        )
    elif figures.slow_part == "outside":
        first = (
            f"Look for work that only rank {rank} does after each batch: "
            "a callback that writes, prints or evaluates. Let it do so once in an "
            "epoch, or in a thread of its own."
        )
    else:
        first = (
            f"Look at rank {rank}'s machine: other processes there, its cores "
            "(`kerasdist run` binds workers to cores of their own), heat, memory."
        )
    change = [first]
    if figures.slow_part == "outside":
        pass  # it isn't the machine
    elif figures.in_step:
        change.append(
            "If that can't be corrected, leave that machine out, or use "
            '`ParameterServerStrategy("async")`, where no worker waits for it.'
        )
    else:
        change.append("A larger `max_staleness` lets the others run further ahead.")
    return reasons, change


def _input(figures: Figures) -> tuple[list[str], list[str]]:
    reasons = [
        f"A worker waits {in_seconds(figures.phases['input'])} in each step for its "
        f"next batch, and computes {in_seconds(figures.phases['compute'])}."
    ]
    if figures.arrays:
        return reasons, [
            "Use a larger `batch_size`: the rows of each batch are taken out of the "
            "arrays, which costs nearly the same for a few rows as for more.",
            "Give `fit` arrays that are in memory, and of the dtype that the model "
            "computes with: `numpy.memmap` and HDF5 are read from disk in each step.",
        ]
    return reasons, [
        "Read ahead and in parallel: `dataset.map(f, num_parallel_calls="
        "tf.data.AUTOTUNE)...prefetch(tf.data.AUTOTUNE)`, `cache()` for data that fit "
        "into memory; more `workers` of a `PyDataset`.",
        "Let each worker read its own files only: "
        "`options.experimental_distribute.auto_shard_policy = "
        "tf.data.experimental.AutoShardPolicy.FILE`.",
    ]


def _network(figures: Figures) -> tuple[list[str], list[str]]:
    traffic = figures.phases["pack"] + figures.phases["communicate"]
    link = "and the speed of the idle link wasn't measured"
    if figures.link is not None:
        link = f"of {human_bytes(figures.link)}/s that were measured on the idle link"
    reasons = [
        f"{human_bytes(figures.bytes_per_step)} per step and worker take "
        f"{in_seconds(traffic)} that no computation hides.",
        f"They are sent at {human_bytes(figures.bandwidth)}/s, {link}.",
    ]
    change = [
        "Send less often: a larger `batch_size`, or `gradient_accumulation_steps` of "
        "the optimizer, which exchanges once in as many steps.",
        'Send less: `compression="bf16"` halves the bytes of float32 gradients.',
    ]
    if not figures.in_step:
        change[1] = (
            "More parameter servers (`--ps`) share the traffic; for large embeddings "
            "use `SGD` or `Adagrad`, with which only updated rows are sent."
        )
    return reasons, change


def _batch(figures: Figures) -> tuple[list[str], list[str]]:
    fixed = sum(
        figures.phases[phase] for phase in ("pack", "communicate", "wait", "outside")
    )
    samples = figures.global_batch / (figures.workers if figures.in_step else 1)
    reasons = [
        f"A step takes {in_seconds(figures.step_seconds)}, of which a worker computes "
        f"{in_seconds(figures.phases['compute'])} on {samples:.0f} samples; "
        f"{in_seconds(fixed)} are costs of a step that don't depend on the batch size."
    ]
    if figures.bandwidth and figures.link:
        reasons.append(
            f"It isn't the link: {human_bytes(figures.bandwidth)}/s of "
            f"{human_bytes(figures.link)}/s are used while workers communicate."
        )
    change = [
        "Use a larger `batch_size` (`kerasdist.callbacks.ScaleLearningRate` adapts the "
        "learning rate)."
    ]
    if figures.share("outside") >= LEAST:
        change.append(
            "Take several steps at once, `model.compile(steps_per_execution=10)`, and "
            "do less in your callbacks after each batch: "
            f"{in_seconds(figures.phases['outside'])} of a step is spent in Python."
        )
    if figures.workers > 1:
        change.append("Use fewer workers for a model this small.")
    return reasons, change


def _stages(figures: Figures) -> tuple[list[str], list[str]]:
    busy = [1 - share for share in figures.idle]
    slowest = max(range(len(busy)), key=lambda stage: busy[stage])
    fastest = min(range(len(busy)), key=lambda stage: busy[stage])
    unequal, bubble = _waits(figures)
    each = ", ".join(f"stage {stage} {share:.0%}" for stage, share in enumerate(busy))
    count = len(busy)
    reasons = [
        f"Stages are busy in a part of each step: {each}.",
        f"{unequal:.0%} of a step is lost because stage {slowest} takes longest, "
        f"{bubble:.0%} because a pipeline has to fill and to drain.",
    ]
    balance = (
        f"Move layers from stage {slowest}, the slowest, to others, first to stage "
        f"{fastest}: `kerasdist.plan`, or `placement='auto'`, cuts a model into stages "
        "that take equally long."
    )
    fill = (
        "More micro-batches: twice as many nearly halve the pipeline's cost (with "
        f"`micro_batches={4 * count}` it's {(count - 1) / (5 * count - 1):.0%} of a "
        "step, if stages take equally long); and a larger `batch_size`, if they get "
        "too small."
    )
    return reasons, [balance, fill] if unequal >= bubble else [fill, balance]


def _compute(figures: Figures) -> tuple[list[str], list[str]]:
    busy = figures.share("compute", "update")
    reasons = [f"{busy:.0%} of each step is computing and updating."]
    change = [
        "More workers make it faster; so do faster devices, `mixed_precision`, or a "
        "smaller model."
    ]
    efficiency = figures.efficiency
    if efficiency is not None and efficiency < _SCALES and figures.workers > 1:
        reasons.append(
            "Each worker computes slower than one alone: workers share cores or "
            "memory, or each one's part of a batch is small."
        )
        change.insert(
            0,
            "Give each worker cores of its own (`kerasdist run` does so), at most as "
            "many workers as there are cores to spare, or a larger `batch_size`.",
        )
    return reasons, change


def _efficiency(figures: Figures) -> list[str]:
    efficiency = figures.efficiency
    if efficiency is None:
        if figures.workers * figures.devices == 1:
            return []
        return [
            "The scaling efficiency isn't known without the speed of one "
            f"{'worker' if figures.devices == 1 else 'device'}: give `baseline=` "
            "examples per second, or `calibrate=True`."
        ]
    count = figures.workers * figures.devices
    return [
        f"{figures.examples_per_second:,.0f} examples/s are {efficiency:.0%} of "
        f"{f'{count} times ' if count > 1 else ''}the speed of one "
        f"{'worker' if figures.devices == 1 else 'device'} "
        f"({figures.baseline:,.0f})."
    ]


def in_seconds(seconds: float) -> str:
    """Return a time as text with a fitting unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"
