"""The file from which the next start of a script continues a preempted `fit`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from kerasdist.collectives.row_exchange import Array
from kerasdist.errors import SnapshotError
from kerasdist.transport.array_file import read_arrays, remove_parts, write_arrays
from kerasdist.transport.framing import Count, from_plain

# The form of the facts in a checkpoint, which may be damaged or another program's.

_Numbers = tuple[float, ...]
# Dtype and shape.
_Form = tuple[str, tuple[Count, ...]]

FitPlace = TypedDict(
    "FitPlace",
    {
        "kind": str,
        "pass": Count,
        "batch": Count,
        "step": Count,
        "steps_seen": Count,
        "steps_per_epoch": Count | None,
        "batches": Count | None,
        "order": Count,
        "data": Any,
        "uses": tuple[Count, ...],
    },
)


class CheckpointFacts(TypedDict):
    """The facts of a preempted `fit`."""

    saved: float
    seed: Count
    fit: Count
    epoch: Count
    place: FitPlace | None
    uses: tuple[Count, ...]
    orders: Count
    communicator_step: Count
    variables: tuple[tuple[tuple[Count, ...], str], ...]
    rates: _Numbers
    factors: tuple[_Numbers | None, ...]
    callbacks: tuple[tuple[str, dict[str, Any]], ...]
    callback_arrays: tuple[tuple[Count, str, Count], ...]
    data: tuple[Count | None, Count | None]
    steps: Count
    metrics: tuple[_Form, ...]
    arrays: tuple[_Form, ...]


def fault_of(facts: Any) -> str:
    """Return what is wrong with a checkpoint's facts; an empty text if nothing is."""
    try:
        from_plain(facts, CheckpointFacts)
    except (TypeError, ValueError, RecursionError) as error:
        return f"its facts are damaged: {error}"
    return ""


FOLDER_VARIABLE = "KERASDIST_CHECKPOINT_DIR"
_FOLDER = ".kerasdist"


class CheckpointFile:
    """The checkpoint of one strategy of this script, with these arguments.

    Args:
        name: The name of the strategy's job, whatever its workers.
        environ: The environment with the folder; the process's by default.

    Attributes:
        path: The absolute path.
    """

    def __init__(self, name: str, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        folder = Path(environ.get(FOLDER_VARIABLE) or _FOLDER).absolute()
        command = [os.path.abspath(sys.argv[0]), *sys.argv[1:], name]
        digest = hashlib.sha256(json.dumps(command).encode()).hexdigest()[:16]
        self.path = folder / f"preempted-{digest}.npz"

    def facts(self) -> dict[str, Any] | None:
        """Return the facts; None without a file.

        Raises:
            SnapshotError: It is damaged, or of another version.
        """
        found = self._read(facts_only=True)
        return None if found is None else found[0]

    def read(self) -> tuple[dict[str, Any], list[Array]] | None:
        """Return the facts and the arrays; None without a file.

        Raises:
            SnapshotError: It is damaged, or of another version.
        """
        return self._read(facts_only=False)

    def _read(self, *, facts_only: bool) -> tuple[dict[str, Any], list[Array]] | None:
        try:
            found = read_arrays(self.path, facts_only=facts_only)
            if fault := fault_of(found[0]):
                raise ValueError(fault)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self.unusable(f"it can't be read ({error})") from error
        return found

    def unusable(self, why: str) -> SnapshotError:
        """Return the error for a checkpoint from which `fit` can't continue."""
        return SnapshotError(
            "The checkpoint of a preempted job can't be used. Received: "
            f"{self.path}: {why}. Expected the checkpoint of the same script with the "
            "same model, callbacks and data. Undo the change to continue, or remove "
            "the file to begin from scratch."
        )

    def write(self, facts: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        """Write the file, in the place of an earlier one.

        Raises:
            OSError: It can't be written; an earlier one is unchanged.
        """
        write_arrays(self.path, {**facts, "saved": time.time()}, arrays)

    def remove(self) -> None:
        """Remove the file, and what killed writers left of it.

        Raises:
            OSError: It can't be removed.
        """
        self.path.unlink(missing_ok=True)
        remove_parts(self.path)
