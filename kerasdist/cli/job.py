"""What `kerasdist run` was asked to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Job"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What to run; everything has been checked.

    Attributes:
        size: Number of workers.
        command: What follows the interpreter: the script or `-m module`, and its
            arguments.
        log_dir: Folder of the logs, which exists. None: no logs.
        tagged: Whether the output of ranks 1.. goes to our standard output.
        cores: Cores by rank; empty: not bound.
        environ: The user's environment.
    """

    size: int
    command: tuple[str, ...]
    log_dir: Path | None
    tagged: bool
    cores: tuple[tuple[int, ...], ...]
    environ: Mapping[str, str]

    def log(self, rank: int) -> Path | None:
        """Return the path of a rank's log; None if it has none."""
        if self.log_dir is None or rank == 0:
            return None
        return self.log_dir / f"rank-{rank}.log"
