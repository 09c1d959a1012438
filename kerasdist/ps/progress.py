"""A worker's progress, which it reports to a server that was started again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Progress"]


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
        if not isinstance(value, dict):
            return cls()
        met, clocks, claims = value.get("met"), {}, {}
        try:
            given = dict(value.get("clocks") or {})
            clocks = {int(table): int(clock) for table, clock in given.items()}
        except (TypeError, ValueError, OverflowError):
            pass
        try:
            claims = {
                int(number): (int(epoch), [int(n) for n in numbers])
                for number, (epoch, numbers) in dict(value.get("claims") or {}).items()
            }
        except (TypeError, ValueError, OverflowError):
            pass
        return cls(
            met=met if isinstance(met, int) else 0,
            clocks=clocks,
            claims=claims,
            joining=value.get("joining") is True,
        )
