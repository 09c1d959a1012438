"""The settings of a job with parameter servers."""

from __future__ import annotations

import dataclasses
from typing import Any

MODES = ("sync", "async")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings that must be the same on all workers and servers of a job.

    Attributes:
        mode: "sync": all workers take each step together, and a lost worker ends the
            job. "async": workers wait for each other only because of `max_staleness`,
            and the others continue without a lost worker.
        max_staleness: The most steps that a worker may be ahead of the slowest one; 0:
            in step; None: any number. For "async" only.
        snapshot_dir: Folder in which each server keeps a snapshot of its tables; None:
            no snapshots. For "async" only: in "sync" the workers hold all weights.
        snapshot_seconds: Seconds between two snapshots; None: not by time.
        snapshot_updates: Updates of a server between two snapshots; None: not by
            number.
        restart_timeout: Seconds that workers wait for the restart of a lost server, and
            that a restarted server waits for its workers. Only with `snapshot_dir`.
    """

    mode: str = "sync"
    max_staleness: int | None = None
    snapshot_dir: str | None = None
    snapshot_seconds: float | None = 60.0
    snapshot_updates: int | None = None
    restart_timeout: float = 120.0

    def __post_init__(self) -> None:
        faults = []
        if self.mode not in MODES:
            faults.append(f"mode={self.mode!r}; expected one of {MODES}")
        stale = self.max_staleness
        if stale is not None and (
            isinstance(stale, bool) or not isinstance(stale, int) or stale < 0
        ):
            faults.append(
                f"max_staleness={stale!r}; expected a number of steps >= 0, or None"
            )
        elif stale is not None and self.mode == "sync":
            faults.append(
                f"max_staleness={stale!r} with mode='sync', in which all workers are "
                "in step anyway; use mode='async', or leave it out"
            )
        if self.snapshot_dir is not None and self.mode == "sync":
            faults.append(
                f"snapshot_dir={self.snapshot_dir!r} with mode='sync', in which the "
                "servers hold nothing; save the model with Keras's callbacks instead"
            )
        for name in ("snapshot_seconds", "restart_timeout"):
            value = getattr(self, name)
            if value is None and name == "snapshot_seconds":
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 < value <= 1e9
            ):
                faults.append(
                    f"{name}={value!r}; expected seconds above 0, at most 1e9"
                )
        updates = self.snapshot_updates
        if updates is not None and (
            isinstance(updates, bool) or not isinstance(updates, int) or updates < 1
        ):
            faults.append(f"snapshot_updates={updates!r}; expected a number >= 1")
        if faults:
            raise ValueError(
                "The settings of the parameter servers can't be used. "
                f"Received: {'; '.join(faults)}."
            )

    @property
    def hold_weights(self) -> bool:
        """Whether the servers hold the weights."""
        return self.mode == "async"

    @property
    def restartable(self) -> bool:
        """Whether a server that is lost may be restarted."""
        return self.mode == "async" and self.snapshot_dir is not None

    def agreed(self) -> dict[str, Any]:
        """Return the settings that workers and servers compare, as JSON values."""
        return {
            "mode": self.mode,
            "max_staleness": self.max_staleness,
            "snapshots": self.snapshot_dir is not None,
        }
