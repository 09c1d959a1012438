"""The report of a whole `fit`: its figures and verdict, as markdown and as text."""

from __future__ import annotations

from kerasdist.callbacks.scaling.bottleneck import Verdict, in_seconds
from kerasdist.callbacks.scaling.metrics import Figures
from kerasdist.placement.advice import human_bytes

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
