"""The tables of a plan, as text: one line per layer, one line per device."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from kerasdist.placement.costs import ModelCost, Run
from kerasdist.placement.partition import Cut

__all__ = [
    "devices",
    "human_bytes",
    "human_flops",
    "layers",
    "parse_bytes",
    "spared",
]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def human_bytes(count: float) -> str:
    """Return bytes as text, for instance `1.5 GB`; 1 KB is 1,000 bytes."""
    return "not limited" if math.isinf(count) else f"{_scaled(count)}B"


def human_flops(count: float) -> str:
    """Return operations as text, for instance `1.5 G`."""
    return _scaled(count).rstrip()


def parse_bytes(text: str) -> int:
    """Return the bytes that a text like `16GB`, `512 MiB` or `1e9` means.

    Raises:
        ValueError: It's none.
    """
    match = re.fullmatch(
        r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE
    )
    try:
        if match is None:
            raise ValueError
        number, unit, binary = match.groups()
        power = "KMGT".index(unit.upper()) + 1 if unit else 0
        if binary and not power:
            raise ValueError
        size = float(number) * (1024 if binary else 1000) ** power
        if not 1 <= size < 2**63:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"A size must be a number of bytes. Received: {text!r}; expected for "
            "instance '16GB', '512MiB' or '1e9'."
        ) from None
    return int(size)


def layers(model: ModelCost, run: Run, placement: Mapping[str, str]) -> str:
    """Return the table of layers.

    Args:
        model: The layers.
        run: How the model is trained.
        placement: From path to device.
    """
    rows = [
        (
            layer.path,
            layer.kind,
            human_bytes(layer.parameter_bytes),
            human_bytes(layer.gradient_bytes + layer.slot_bytes),
            human_bytes(layer.activation_bytes(run)),
            human_flops(layer.flops(run)),
            placement.get(layer.path, ""),
        )
        for layer in model.layers
    ]
    total = (
        "all layers",
        "",
        human_bytes(sum(x.parameter_bytes for x in model.layers)),
        human_bytes(sum(x.gradient_bytes + x.slot_bytes for x in model.layers)),
        human_bytes(sum(x.activation_bytes(run) for x in model.layers)),
        human_flops(sum(x.flops(run) for x in model.layers)),
        "",
    )
    parts = "" if run.micro_batches == 1 else f" in {run.micro_batches} micro-batches"
    again = ", activations computed again" if run.rematerialize else ""
    return "\n".join(
        [
            f"Layers, for a batch of {run.batch_size} rows{parts}{again}:",
            "",
            _aligned(
                (
                    "layer",
                    "class",
                    "parameters",
                    "gradients + slots",
                    "activations",
                    "FLOPs",
                    "device",
                ),
                [*rows, total],
                left=(0, 1, 6),
            ),
        ]
    )


def devices(
    model: ModelCost,
    run: Run,
    cut: Cut,
    where: Sequence[tuple[str, int | None, str]],
) -> str:
    """Return the table of devices.

    Args:
        model: The layers.
        run: How the model is trained.
        cut: The stages.
        where: Of each device its name, memory limit in bytes, and where that was found.
    """
    rows = []
    work = sum(layer.flops(run) for layer in model.layers)
    for number, (name, limit, _) in enumerate(where):
        start, stop = cut.borders[number : number + 2]
        mine = model.layers[start:stop]
        used = cut.memory[number]
        if limit is None:
            verdict = ""
        elif used <= limit:
            verdict = f"{100 * used / limit:.0f} %"
        else:
            verdict = f"{human_bytes(used - limit)} too much"
        share = sum(x.flops(run) for x in mine) / work if work else 0.0
        rows.append(
            (
                name,
                str(len(mine)),
                human_bytes(sum(x.parameter_bytes for x in mine)),
                human_bytes(sum(x.gradient_bytes + x.slot_bytes for x in mine)),
                human_bytes(sum(x.activation_bytes(run) for x in mine)),
                human_bytes(cut.entering[number]),
                human_bytes(used),
                human_bytes(math.inf if limit is None else limit),
                verdict,
                f"{100 * share:.0f} %",
            )
        )
    head = (
        "device",
        "layers",
        "parameters",
        "gradients + slots",
        "activations",
        "inputs",
        "at most",
        "memory",
        "used",
        "work",
    )
    sources = sorted({f"{name}: {found}" for name, _, found in where if found})
    lines = ["Devices:", "", _aligned(head, rows, left=(0,))]
    if sources:
        lines += ["", "Memory is", *(f"  {line}" for line in sources)]
    return "\n".join(lines)


def spared(run: Run, names: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """Return lines about memory saved by rematerialization; none without it.

    Args:
        run: How the model is trained.
        names: The devices.
        sizes: Bytes that each of them doesn't hold because of it.
    """
    if not run.rematerialize:
        return []
    each = ", ".join(
        f"{human_bytes(size)} on {name}"
        for name, size in zip(names, sizes, strict=True)
    )
    return ["", f"Computing activations again saves {each}."]


def _scaled(count: float) -> str:
    for unit, size in reversed(_UNITS.items()):
        # A number that would be rounded up to a thousand is one of the next unit.
        if unit and count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} "


def _aligned(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int]
) -> str:
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
