"""A worker's progress, which it reports to a server that was started again."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of one worker.

    Attributes:
        met: Number of the last collective that it has finished.
        clocks: Its clock in each table, by the table's number.
        claims: By dataset the epoch, and the batches that it has claimed last.
        joining: Whether it has started late, and hasn't joined the others.
    """

    met: int = 0
    clocks: Mapping[int, int] = field(default_factory=dict)
    claims: Mapping[int, tuple[int, Sequence[int]]] = field(default_factory=dict)
    joining: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Progress:
        """Return what `to_json` made; parts that are damaged count as missing."""
        given = value if isinstance(value, dict) else {}
        met, clocks, claims = given.get("met"), {}, {}
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            clocks = {
                int(k): int(v) for k, v in dict(given.get("clocks") or {}).items()
            }
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            claims = {
                int(number): (int(epoch), [int(n) for n in numbers])
                for number, (epoch, numbers) in dict(given.get("claims") or {}).items()
            }
        return cls(
            met=met if isinstance(met, int) else 0,
            clocks=clocks,
            claims=claims,
            joining=given.get("joining") is True,
        )
