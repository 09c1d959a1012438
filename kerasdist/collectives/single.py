"""The communicator of one worker, without communication."""

from __future__ import annotations

import numpy as np

from kerasdist.collectives.checked import CheckedCommunicator
from kerasdist.collectives.fused_buffer import FusedBuffer
from kerasdist.collectives.row_exchange import Array
from kerasdist.transport.base import Peer
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import Call
from kerasdist.transport.liveness.failure_protocol import Supervisor


class SingleCommunicator(CheckedCommunicator):
    """Collectives of one rank: every result is a copy of the argument."""

    def __init__(self, address: str = "this worker") -> None:
        super().__init__(0, [Peer(0, address)], Supervisor(), 1.0)

    def _reduce(
        self, source: FusedBuffer, lend: bool, call: Call, deadline: Deadline
    ) -> Array:
        elements, dtype = source.elements, source.dtype
        flat = np.empty(elements, dtype)
        source.copy_to(flat, 0, elements)
        return flat

    def _gather(
        self, views: list[memoryview], call: Call, deadline: Deadline
    ) -> None: ...

    def _broadcast(
        self, view: memoryview, root: int, call: Call, deadline: Deadline
    ) -> None: ...

    def _barrier(self, call: Call, deadline: Deadline) -> None: ...

    def _abort(self) -> None: ...

    def _close(self) -> None: ...
