"""The file from which the next start of a script continues a preempted `fit`.

It is one of numpy's `.npz` files: the facts as JSON, and each array as its bytes, since
numpy itself knows no bfloat16. It is written to another file in the same folder, synced
to the disk, and renamed: there is a whole one, or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import stat
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kerasdist.collectives.row_exchange import Array
from kerasdist.errors import SnapshotError

# The form of the facts in a checkpoint, which may be damaged or another program's.


def fault_of(facts: Any) -> str:
    """Return what is wrong with a checkpoint's facts; an empty text if nothing is."""
    return _fault(facts, _FACTS, "facts")


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _count_or_none(value: Any) -> bool:
    return value is None or _count(value)


def _number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _shape(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _list_of(*forms: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return whether a value is a list of lists of these forms."""

    def check(value: Any) -> bool:
        return isinstance(value, list) and all(
            isinstance(each, list)
            and len(each) == len(forms)
            and all(form(part) for form, part in zip(forms, each, strict=True))
            for each in value
        )

    return check


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _factors(value: Any) -> bool:
    return isinstance(value, list) and all(
        each is None or _numbers(each) for each in value
    )


def _pair(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(map(_count_or_none, value))
    )


def _state(value: Any) -> bool:
    return isinstance(value, dict)


def _anything(value: Any) -> bool:
    return True


def _place(value: Any) -> bool:
    return value is None or not _fault(value, _PLACE, "place")


_PLACE: Mapping[str, Callable[[Any], bool]] = {
    "kind": _text,
    "pass": _count,
    "batch": _count,
    "step": _count,
    "steps_seen": _count,
    "steps_per_epoch": _count_or_none,
    "batches": _count_or_none,
    "order": _count,
    "data": _anything,
    "uses": _counts,
}
_FACTS: Mapping[str, Callable[[Any], bool]] = {
    "saved": _number,
    "seed": _count,
    "fit": _count,
    "epoch": _count,
    "place": _place,
    "uses": _counts,
    "orders": _count,
    "communicator_step": _count,
    "variables": _list_of(_shape, _text),
    "rates": _numbers,
    "factors": _factors,
    "callbacks": _list_of(_text, _state),
    "callback_arrays": _list_of(_count, _text, _count),
    "data": _pair,
    "steps": _count,
    "metrics": _list_of(_text, _shape),
    "arrays": _list_of(_text, _shape),
}


def _fault(facts: Any, form: Mapping[str, Callable[[Any], bool]], what: str) -> str:
    if not isinstance(facts, dict):
        return f"its {what} are {type(facts).__name__}"
    for name, is_right in form.items():
        if name not in facts:
            return f"its {what} have no {name!r}"
        if not is_right(facts[name]):
            return f"its {what} have an unexpected {name!r}: {facts[name]!r:.80}"
    return ""


FOLDER_VARIABLE = "KERASDIST_CHECKPOINT_DIR"
_FOLDER = ".kerasdist"
_VERSION = 1


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
        found = self._read(arrays=False)
        return None if found is None else found[0]

    def read(self) -> tuple[dict[str, Any], list[Array]] | None:
        """Return the facts and the arrays; None without a file.

        Raises:
            SnapshotError: It is damaged, or of another version.
        """
        return self._read(arrays=True)

    def _read(self, *, arrays: bool) -> tuple[dict[str, Any], list[Array]] | None:
        try:
            with self._opened() as opened, np.load(opened, allow_pickle=False) as file:
                facts = json.loads(file["facts"].tobytes())
                if facts["version"] != _VERSION:
                    raise ValueError(f"its format is {facts['version']!r}")
                if fault := fault_of(facts):
                    raise ValueError(fault)
                found = []
                for number, (name, shape) in enumerate(facts["arrays"]):
                    if arrays:
                        octets = file[f"array{number}"]
                        found.append(octets.view(np.dtype(name)).reshape(shape))
                return facts, found
        except FileNotFoundError:
            return None
        except (
            *(OSError, EOFError, LookupError, TypeError, ValueError),
            *(zipfile.BadZipFile, zlib.error),
        ) as error:
            raise self.unusable(f"it can't be read ({error})") from error

    def _opened(self) -> BinaryIO:
        """Open the file without waiting for the writer of a FIFO in its place."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        opened = open(os.open(self.path, flags), "rb")  # noqa: SIM115
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            opened.close()
            raise ValueError("it isn't a regular file")
        return opened

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
        forms = [[array.dtype.name, list(array.shape)] for array in arrays]
        known = {"version": _VERSION, "saved": time.time(), "arrays": forms}
        text = json.dumps({**facts, **known}).encode()
        members: dict[str, Any] = {
            f"array{number}": np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for number, array in enumerate(arrays)
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.part")
        # Only the owner may read the weights, and no existing link is followed.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(part, flags, 0o600)
        try:
            with open(descriptor, "wb") as file:
                np.savez(file, facts=np.frombuffer(text, np.uint8), **members)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self) -> None:
        """Remove the file, and what killed writers left of it.

        Raises:
            OSError: It can't be removed.
        """
        self.path.unlink(missing_ok=True)
        for part in self.path.parent.glob(f".{self.path.name}.*.part"):
            with contextlib.suppress(OSError):
                part.unlink()
