"""A worker's view of a table, whose parts are on all servers."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kerasdist import errors
from kerasdist.collectives.row_exchange import Array
from kerasdist.parameter_server.channel import Channel, Message, Spec, checksum_of
from kerasdist.parameter_server.client.server_job import ServerJob
from kerasdist.parameter_server.layout import Layout, Piece, dtype_of
from kerasdist.parameter_server.served_table import merge_rows
from kerasdist.parameter_server.server.handler import request_of
from kerasdist.parameter_server.tables import Open, Opened, Pull, Push, TableState
from kerasdist.transport.framing import read_record
from kerasdist.transport.tracing import SpanTimer, now


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a sparse variable.

    Attributes:
        indices: Their indices, of shape `(n,)`; in changes in any order and with
            repetitions, which are added up.
        values: The rows, of shape `(n, ...)` with the variable's further dimensions.
    """

    indices: npt.NDArray[np.integer]
    values: Array


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """The change of a dense variable, computed when it is sent, without a copy.

    Attributes:
        value: Its present value.
        base: Its earlier value; of the same shape.
    """

    value: Array
    base: Array


@dataclasses.dataclass(frozen=True, slots=True)
class Pulled:
    """The values that a worker reads.

    Attributes:
        values: For each variable its present values, in its dtype and shape, not to be
            written to; None for a sparse one. Valid until the next call of any table
            or collective.
        rows: For each sparse variable, by its index, the rows that have changed since
            this worker's last read, with increasing indices: their present values.
        clock: This worker's clock.
        least: The least clock of the live workers, the least over servers.
        staleness: Steps that the slowest worker was behind, the most over servers.
        waited: Seconds that a server made this worker wait for slower ones.
    """

    values: list[Array | None]
    rows: dict[int, Rows]
    clock: int
    least: int
    staleness: int
    waited: float


class RemoteTable:
    """A table over all servers. Made by `ServerClient.open_table`.

    Attributes:
        number: Its number among the tables of the job.
        layout: The assignment of parts to servers.
        initial: The values that all begin with, in the variables' dtypes.
        observed: Number of this worker's reads by staleness.
    """

    def __init__(self, client: ServerJob, number: int, layout: Layout) -> None:
        self.number = number
        self.layout = layout
        self.initial: list[Array] = []
        self.observed: collections.Counter[int] = collections.Counter()
        self._client = client
        servers = range(layout.servers)
        self._dense = [layout.dense(server) for server in servers]
        self._sparse = [layout.sparse(server) for server in servers]
        # Generation of each server, and the version of the last read there.
        self._seen = [(0, -1)] * layout.servers
        self._whole: dict[int, Array] = {}

    @property
    def clock(self) -> int:
        """This worker's clock: the last step that it has finished."""
        return self._client.clocks.get(self.number, 0)

    @clock.setter
    def clock(self, value: int) -> None:
        self._client.clocks[self.number] = value

    @property
    def updates(self) -> int:
        """Number of updates by all workers, at this one's last read."""
        # The first values count as one.
        return max(0, self._seen[0][1] - 1)

    def open(self, values: Sequence[Array] | None) -> None:
        """Open the table; see `ServerClient.open_table`, which calls it."""
        layout = self.layout
        request = Open(
            table=self.number,
            use=self._client.use,
            variables=layout.variables,
            has_values=values is not None,
        )

        def build(server: int, channel: Channel) -> Message:
            parts = [] if values is None else layout.cut(server, values)
            return request_of(request, parts)

        answers = self._request_all(build)
        for server, answer in enumerate(answers):
            opened = read_record(answer.meta, Opened, "A reply")
            self._check_sum(server, answer, opened.crc)
            self.clock = max(self.clock, opened.clock)
        pulled = self._unpack(answers)
        self.initial = [
            np.array(pulled.rows[i].values if variable.sparse else pulled.values[i])
            for i, variable in enumerate(layout.variables)
        ]

    def push_pull(self, deltas: Sequence[Array | Change | Rows | None]) -> Pulled:
        """Push the changes of one step, and read the present values.

        Returns when `max_staleness` allows this worker's next step.

        Args:
            deltas: The change of each variable: an array of its shape, or a `Change`;
                None for no change; for a sparse variable also `Rows`. (Of an array for
                a sparse variable the rows that aren't 0 are sent.)

        Raises:
            ValueError: They don't fit the variables; nothing was sent.
            CollectiveError: See `kerasdist.errors`.
        """
        recorder = self._client.recorder
        begin = now()
        rows = self._check(deltas)
        with self._client.calling("a step's push"):
            clock = self.clock + 1

            def build(server: int, channel: Channel) -> Message:
                since = self._since(server)
                push = Push(table=self.number, clock=clock, since=since)
                return request_of(push, self._pack(server, channel, deltas, rows))

            answers = self._request_all(build)
            self.clock = clock
            timer = SpanTimer(recorder)
            pulled = self._unpack(answers)
        if recorder is not None:
            timer.end("receive", sum(answer.nbytes for answer in answers))
            recorder.add("push_pull", begin, now(), what=f"clock {clock}")
        self.observed[pulled.staleness] += 1
        return pulled

    def pull(self) -> Pulled:
        """Read the present values; it doesn't wait, and no clock ticks.

        Raises:
            CollectiveError: See `kerasdist.errors`.
        """
        with self._client.calling("a pull"):

            def build(server: int, channel: Channel) -> Message:
                return request_of(Pull(table=self.number, since=self._since(server)))

            return self._unpack(self._request_all(build))

    def _request_all(self, build: Callable[[int, Channel], Message]) -> list[Message]:
        servers = range(self.layout.servers)
        return self._client.connections.request_all(
            [functools.partial(build, s) for s in servers]
        )

    # Sending.

    def _check(self, deltas: Sequence[Array | Change | Rows | None]) -> dict[int, Rows]:
        """Return the changed rows of sparse variables, each once, in order."""
        variables = self.layout.variables
        if len(deltas) != len(variables):
            raise ValueError(
                "There must be a change, or None, for each variable. Received: "
                f"{len(deltas)} changes, expected {len(variables)}."
            )
        rows: dict[int, Rows] = {}
        for index, (delta, variable) in enumerate(zip(deltas, variables, strict=True)):
            if delta is None:
                continue
            if isinstance(delta, Change):
                if variable.sparse:
                    delta = delta.value - delta.base
                elif np.shape(delta.base) != variable.shape:
                    delta = delta.base
                else:
                    delta = delta.value
            if not isinstance(delta, Rows):
                if np.shape(delta) != variable.shape:
                    raise ValueError(
                        f"A change doesn't fit {variable.name!r}. Received: shape "
                        f"{np.shape(delta)}, expected {variable.shape}."
                    )
                if variable.sparse:
                    flat = np.asarray(delta).reshape(variable.rows, -1)
                    touched = np.flatnonzero(flat.any(axis=1))
                    rows[index] = Rows(touched, flat[touched])
                continue
            indices = np.asarray(delta.indices).reshape(-1)
            shape = (indices.size, *variable.shape[1:])
            fits = variable.sparse and np.shape(delta.values) == shape
            if fits and indices.size:
                fits = indices.dtype.kind in "iu"
                fits = fits and indices.min() >= 0 and indices.max() < variable.rows
            if not fits:
                raise ValueError(
                    f"Changed rows don't fit {variable}. Received: indices of shape "
                    f"{indices.shape}, dtype {indices.dtype}, rows of shape "
                    f"{np.shape(delta.values)}; expected rows of shape {shape} of a "
                    f"sparse variable, indices from 0 to {variable.rows - 1}."
                )
            values = np.asarray(delta.values, variable.held)
            flat = values.reshape(indices.size, variable.row_elements)
            rows[index] = Rows(*merge_rows(indices, flat))
        return rows

    def _pack(
        self,
        server: int,
        channel: Channel,
        deltas: Sequence[Array | Change | Rows | None],
        rows: dict[int, Rows],
    ) -> list[Array]:
        layout = self.layout
        specs: list[Spec] = []
        for name, pieces in self._dense[server].items():
            specs.append((name, (sum(map(layout.elements, pieces)),)))
        cuts = []
        for piece in self._sparse[server]:
            variable = layout.variables[piece.variable]
            found = rows.get(piece.variable)
            start = stop = 0
            if found is not None:
                start, stop = np.searchsorted(found.indices, [piece.start, piece.stop])
            cuts.append((piece, found, start, stop))
            narrow = "int32" if piece.rows < 2**31 else "int64"
            specs.append((narrow, (int(stop - start),)))
            specs.append((variable.held, (int(stop - start), variable.row_elements)))
        parts = channel.place(specs)
        left = list(parts)
        for piece, part in self._take_dense(server, left):
            delta = deltas[piece.variable]
            if delta is None:
                part.fill(0)
            elif isinstance(delta, Change):
                value, base = (
                    layout.rows_of(piece, array).reshape(-1)
                    for array in (delta.value, delta.base)
                )
                with np.errstate(all="ignore"):  # NaN isn't an error here
                    np.subtract(value, base, out=part, dtype=part.dtype)
            else:
                part[:] = layout.rows_of(piece, delta).reshape(-1)  # type: ignore[arg-type]
        for piece, found, start, stop in cuts:
            indices, values = left.pop(0), left.pop(0)
            if found is not None:
                mine = found.indices[start:stop]
                np.subtract(mine, piece.start, out=indices, casting="unsafe")
                values[...] = found.values[start:stop]
        return parts

    def _take_dense(
        self, server: int, parts: list[Array]
    ) -> Iterator[tuple[Piece, Array]]:
        """Take the arrays of dense pieces from a server's parts, which begin with them.

        Returns:
            Each piece, and its elements.
        """
        for pieces in self._dense[server].values():
            flat = parts.pop(0)
            for piece in pieces:
                end = piece.offset + self.layout.elements(piece)
                yield piece, flat[piece.offset : end]

    # Receiving.

    def _since(self, server: int) -> int:
        generation, version = self._seen[server]
        # A restarted server counts versions from a snapshot: they aren't comparable.
        return (
            version if generation == self._client.connections[server].generation else -1
        )

    def _note_version(self, server: int, version: int) -> None:
        self._seen[server] = (self._client.connections[server].generation, version)

    def _unpack(self, answers: Sequence[Message]) -> Pulled:
        variables = self.layout.variables
        values: list[Array | None] = [None] * len(variables)
        found: dict[int, list[tuple[Piece, Array, Array]]] = {}
        states = [read_record(each.meta, TableState, "A reply") for each in answers]
        for server, answer in enumerate(answers):
            parts = list(answer.arrays)
            for piece, part in self._take_dense(server, parts):
                self._place(piece, part, values)
            for piece in self._sparse[server]:
                indices, rows = parts.pop(0), parts.pop(0)
                found.setdefault(piece.variable, []).append((piece, indices, rows))
            self._note_version(server, states[server].version)
        merged = {}
        for index, cuts in found.items():
            variable = variables[index]
            cuts.sort(key=lambda cut: cut[0].start)
            indices = np.concatenate([i.astype(np.int64) + p.start for p, i, _ in cuts])
            rows = np.concatenate([r for _, _, r in cuts])
            shape = (indices.size, *variable.shape[1:])
            typed = rows.astype(dtype_of(variable.dtype), copy=False)
            merged[index] = Rows(indices, typed.reshape(shape))
        return Pulled(
            values=values,
            rows=merged,
            clock=self.clock,
            least=min(state.least for state in states),
            staleness=max(state.staleness for state in states),
            waited=max(state.waited for state in states),
        )

    def _place(self, piece: Piece, flat: Array, values: list[Array | None]) -> None:
        variable = self.layout.variables[piece.variable]
        dtype = dtype_of(variable.dtype)
        if piece.rows == variable.rows and dtype == flat.dtype:
            values[piece.variable] = flat.reshape(variable.shape)
            return
        whole = self._whole.get(piece.variable)
        if whole is None:
            whole = np.empty(variable.shape, dtype)
            self._whole[piece.variable] = whole
        rows = whole.reshape(variable.rows, variable.row_elements)
        rows[piece.start : piece.stop] = flat.reshape(piece.rows, variable.row_elements)
        values[piece.variable] = whole

    def _check_sum(self, server: int, answer: Message, expected: int) -> None:
        crc = checksum_of(answer.arrays)
        if crc != expected:
            raise self._client.fail(
                errors.CollectiveError(
                    f"The first values of table {self.number} aren't those that server "
                    f"{server} sent. Received: CRC-32 {crc:#010x}, expected "
                    f"{expected}. The network or a memory is faulty."
                )
            )
