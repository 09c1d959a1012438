"""The assignment of variables' parts to servers: a function of numbers.

A variable that is larger than a fair share (all bytes divided by the number of
servers) is cut by rows into nearly equal pieces that aren't. Then the pieces are
assigned, the largest first, each to the server that has least so far (Graham, "Bounds
on multiprocessing timing anomalies", 1969):

    2 servers, fair share 600                      server 0      server 1
    embedding   1000 = 500 + 500                   500           500
    kernel       160                               500 + 160
    bias          40                                             500 + 40

All tasks compute the same layout from the same variables; `fingerprint` proves it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kerasdist.collectives.row_exchange import Array
from kerasdist.transport.framing import DTYPES, Count, to_plain

# The settings of a job with parameter servers.

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
        if stale is not None and not (type(stale) is int and stale >= 0):
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
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 < value <= 1e9:
                faults.append(
                    f"{name}={value!r}; expected seconds above 0, at most 1e9"
                )
        updates = self.snapshot_updates
        if updates is not None and not (type(updates) is int and updates >= 1):
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


# A smaller variable isn't worth cutting.
_LEAST_CUT_BYTES = 4096
# Updates of a table are small beside its values: 16 bits would lose them.
_HELD = {"float16": "float32", "bfloat16": "float32"}
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of this name, one of `framing.DTYPES`.

    Raises:
        TypeError: There is no such dtype here.
    """
    if name == "bfloat16":
        # Installed with TensorFlow; without it no worker sends this dtype.
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    if name not in DTYPES[1:]:
        raise TypeError(f"Unknown dtype. Received: {name!r}; expected {DTYPES[1:]}.")
    return np.dtype(name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variable:
    """One variable of a table.

    Attributes:
        name: For messages; need not be unique.
        shape: Its shape. A row is an element of the first dimension; a scalar is one
            row.
        dtype: "float16", "bfloat16", "float32" or "float64".
        sparse: Whether its changes are of few rows: then only these are sent.

    Raises:
        ValueError: A value is wrong.
    """

    name: str
    shape: tuple[Count, ...]
    dtype: str = "float32"
    sparse: bool = False

    def __post_init__(self) -> None:
        faults = []
        if self.dtype not in _FLOATS:
            faults.append(f"dtype={self.dtype!r}; expected one of {_FLOATS}")
        if any(isinstance(n, bool) or n < 0 for n in self.shape):
            faults.append(f"shape={self.shape!r}; expected integers >= 0")
        if self.sparse and not self.shape:
            faults.append("sparse=True for a scalar; expected at least one dimension")
        if faults:
            raise ValueError(
                f"Variable {self.name!r} can't be held by a server. "
                f"Received: {'; '.join(faults)}."
            )

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])

    @property
    def held(self) -> str:
        """The dtype in which servers hold and send it, of at least 32 bits."""
        return _HELD.get(self.dtype, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, as it is held."""
        return self.row_elements * np.dtype(self.held).itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of one variable, on one server.

    Attributes:
        variable: Index of the variable.
        start: Its first row in the variable.
        stop: One after its last row.
        server: Index of the server.
        offset: Where it begins among the server's dense elements of its dtype; 0 for
            a piece of a sparse variable.
    """

    variable: int
    start: int
    stop: int
    server: int
    offset: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


class Layout:
    """The variables of one table over the servers.

    Args:
        variables: The variables, in the order in which all workers give them.
        servers: Number of servers, >= 1.

    Attributes:
        variables: As given.
        servers: As given.
        pieces: All pieces, in the order of the variables and of their rows.
    """

    def __init__(self, variables: Sequence[Variable], servers: int) -> None:
        if servers < 1:
            raise ValueError(
                f"There must be a server. Received: servers={servers}; expected >= 1."
            )
        self.variables = tuple(variables)
        self.servers = servers
        self.pieces = _assign(self.variables, servers)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the variables and of the number of servers."""
        text = json.dumps([to_plain(self.variables), self.servers])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def dense(self, server: int) -> dict[str, list[Piece]]:
        """Return the server's pieces of dense variables, by the dtype they're held in.

        They are in the order of their offsets; dtypes in alphabetical order.
        """
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            variable = self.variables[piece.variable]
            if piece.server == server and not variable.sparse:
                found.setdefault(variable.held, []).append(piece)
        return dict(sorted(found.items()))

    def sparse(self, server: int) -> list[Piece]:
        """Return the server's pieces of sparse variables, in order."""
        return [
            piece
            for piece in self.pieces
            if piece.server == server and self.variables[piece.variable].sparse
        ]

    def elements(self, piece: Piece) -> int:
        """Return the number of a piece's elements."""
        return piece.rows * self.variables[piece.variable].row_elements

    def server_bytes(self) -> list[int]:
        """Return the bytes on each server, as they are held."""
        total = [0] * self.servers
        for piece in self.pieces:
            row_bytes = self.variables[piece.variable].row_bytes
            total[piece.server] += piece.rows * row_bytes
        return total

    def cut(self, server: int, arrays: Sequence[Array]) -> list[Array]:
        """Return a server's part of all variables' values, as it is held.

        Args:
            server: Index of the server.
            arrays: The values of all variables, in order.

        Returns:
            One flat array per dtype of `dense`, then one of shape `(rows,
            row_elements)` per piece of `sparse`.
        """
        parts: list[Array] = []
        for name, pieces in self.dense(server).items():
            flat = np.empty(sum(map(self.elements, pieces)), name)
            for piece in pieces:
                end = piece.offset + self.elements(piece)
                flat[piece.offset : end] = self.rows_of(
                    piece, arrays[piece.variable]
                ).reshape(-1)
            parts.append(flat)
        for piece in self.sparse(server):
            held = self.variables[piece.variable].held
            rows = self.rows_of(piece, arrays[piece.variable])
            parts.append(rows.astype(held))
        return parts

    def rows_of(self, piece: Piece, values: Array) -> Array:
        """Return a piece of its variable's values, of shape `(rows, row_elements)`."""
        variable = self.variables[piece.variable]
        flat = np.asarray(values).reshape(variable.rows, variable.row_elements)
        return flat[piece.start : piece.stop]

    def check(self, arrays: Sequence[Array]) -> None:
        """Check that there is one array of the right shape for each variable.

        Raises:
            ValueError: There isn't.
        """
        given = [np.shape(array) for array in arrays]
        expected = [variable.shape for variable in self.variables]
        if given != expected:
            wrong = [
                f"{v.name!r}: {shape}, expected {v.shape}"
                for v, shape in zip(self.variables, given, strict=False)
                if v.shape != shape
            ]
            raise ValueError(
                "The arrays aren't those of the table's variables. Received: "
                f"{len(given)} arrays, expected {len(expected)}; {'; '.join(wrong)}."
            )

    def difference(self, other: Layout) -> str:
        """Describe the first difference to another layout; empty if there is none."""
        if self.servers != other.servers:
            return f"{self.servers} servers, the other {other.servers}"
        if len(self.variables) != len(other.variables):
            return f"{len(self.variables)} variables, the other {len(other.variables)}"
        for mine, theirs in zip(self.variables, other.variables, strict=True):
            if mine != theirs:
                return f"{mine}, the other {theirs}"
        return ""

    def __repr__(self) -> str:
        names = {variable.name for variable in self.variables}
        return f"Layout({len(names)} variables on {self.servers} servers)"


def _assign(variables: Sequence[Variable], servers: int) -> tuple[Piece, ...]:
    total = sum(v.rows * v.row_bytes for v in variables)
    share = max(total / servers, _LEAST_CUT_BYTES)
    cuts: list[tuple[int, int, int, int]] = []  # bytes, variable, start, stop
    for index, variable in enumerate(variables):
        size = variable.rows * variable.row_bytes
        count = max(1, min(math.ceil(size / share), variable.rows))
        for part in range(count):
            start = variable.rows * part // count
            stop = variable.rows * (part + 1) // count
            cuts.append(((stop - start) * variable.row_bytes, index, start, stop))
    loads = [0] * servers
    chosen: dict[tuple[int, int], int] = {}
    for size, index, start, _ in sorted(cuts, key=lambda c: (-c[0], c[1], c[2])):
        server = min(range(servers), key=loads.__getitem__)
        loads[server] += size
        chosen[index, start] = server
    pieces = []
    used: dict[tuple[int, str], int] = {}
    for _, index, start, stop in cuts:
        variable, server = variables[index], chosen[index, start]
        offset = 0
        if not variable.sparse:
            key = server, variable.held
            offset = used.get(key, 0)
            used[key] = offset + (stop - start) * variable.row_elements
        pieces.append(Piece(index, start, stop, server, offset))
    return tuple(pieces)
