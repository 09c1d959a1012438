"""Numbers, bytes and operations as text, and sizes that users write."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def counted(number: int, noun: str) -> str:
    """Return a number of things as text, for instance `1 worker` or `2 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def human_bytes(count: float) -> str:
    """Return bytes as text, for instance `1.5 GB`; 1 KB is 1,000 bytes."""
    return "not limited" if math.isinf(count) else f"{_scaled(count)}B"


def human_flops(count: float) -> str:
    """Return operations as text, for instance `1.5 G`."""
    return _scaled(count).rstrip()


def _scaled(count: float) -> str:
    for unit, size in reversed(_UNITS.items()):
        # A number that would be rounded up to a thousand is one of the next unit.
        if unit and count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} "


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
