"""The exceptions of kerasdist, one tree.

    KerasDistError                      everything below
    ├── ClusterError            (ValueError) the cluster settings are wrong
    │   └── AddressInUseError   (OSError) this worker's address can't be listened on
    ├── StartupError            (TimeoutError) ranks are missing, each with the reason
    ├── AuthenticationError     the other side doesn't hold this job's secret
    ├── ProtocolError           the bytes received aren't this version's protocol
    ├── CollectiveError         a collective failed; its communicator is unusable
    │   ├── WorkerLost          a rank died, froze or left (`rank`, `host`, `step`)
    │   ├── ServerLost          a parameter server died or froze (`index`, `address`)
    │   ├── CollectiveMismatch  ranks called different collectives
    │   ├── CollectiveTimeout   (TimeoutError) all are alive, but not all took part
    │   ├── SharedMemoryFull    (OSError) there is no memory for shared buffers
    │   └── TransportClosed     closed by us: used after `close()`
    ├── IncompatibleVersionError    an installed package has an unsupported version
    │   ├── IncompatibleKerasError          that of Keras
    │   └── IncompatibleTensorFlowError     that of TensorFlow
    ├── FunctionError           a function that `kerasdist.run` called has failed
    ├── SnapshotError           a snapshot or checkpoint is damaged, or of another job
    └── PlanError       (ValueError) a model fits into no placement on these devices

The class shows where the fault lies: `ClusterError` in the settings;
`StartupError`, `WorkerLost` and `ServerLost` in a peer; `ProtocolError` and
`AuthenticationError` in an unknown process; `CollectiveMismatch` in the script;
`TransportClosed` in the caller. A message states what is wrong, what was
received, what was expected, and the remedy.

All of them survive `pickle`, so that they can cross process boundaries in
tests and in the launcher.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AddressInUseError",
    "AuthenticationError",
    "ClusterError",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "FunctionError",
    "IncompatibleKerasError",
    "IncompatibleTensorFlowError",
    "IncompatibleVersionError",
    "KerasDistError",
    "PlanError",
    "ProtocolError",
    "ServerLost",
    "SharedMemoryFull",
    "SnapshotError",
    "StartupError",
    "TransportClosed",
    "WorkerLost",
]


class KerasDistError(Exception):
    """Base class of every error that kerasdist raises on purpose."""

    # Keras raises an error with this mark as it is. Any other one that leaves a layer's
    # `call` is made again from a message alone, as a `RuntimeError` if it takes more.
    _keras_call_info_injected = True


class ClusterError(KerasDistError, ValueError):
    """The cluster settings (`TF_CONFIG`, Slurm, `cluster=`) are wrong.

    Raised before any socket, thread or segment exists.
    """


class AddressInUseError(ClusterError, OSError):
    """This worker can't listen on its own address."""


class StartupError(KerasDistError, TimeoutError):
    """Not all workers of the job connected in time.

    Attributes:
        missing: Mapping from rank to the reason why it is missing.
    """

    def __init__(self, message: str, missing: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.missing = dict(missing or {})

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.missing)


class AuthenticationError(KerasDistError):
    """The other side of a connection doesn't hold this job's secret."""


class ProtocolError(KerasDistError):
    """The bytes received on a connection aren't this version of kerasdist's protocol.

    Attributes:
        version: The other side's version of the protocol if it differs from this
            one, else None.
    """

    def __init__(self, message: str = "", *, version: int | None = None) -> None:
        super().__init__(message)
        self.version = version


class CollectiveError(KerasDistError):
    """A collective failed; its communicator can't be used any more."""


class WorkerLost(CollectiveError):
    """A worker died, froze or left while others still needed it.

    Attributes:
        rank: The rank that was lost.
        host: Its address, `"host:port"`, or its host's name.
        step: The optimizer step at which the loss was detected (the number
            of gradient reductions that this rank had begun; of steps, where the
            chief drives the others' devices).
        reason: What was observed, e.g. `"its connection was closed"`.
        others_go_on: Whether the job continues without it, as with `mode="async"`.
    """

    def __init__(
        self, rank: int, host: str, step: int, reason: str, others_go_on: bool = False
    ) -> None:
        then = (
            "The other workers can't go on without it. Look at the output of "
            f"rank {rank} for the first error, then start the job again."
        )
        if others_go_on:
            then = (
                "The other workers go on without it. A new process with its task may "
                "join them."
            )
        super().__init__(
            f"Rank {rank} ({host}) was lost at step {step}: {reason}. {then}"
        )
        self.rank = rank
        self.host = host
        self.step = step
        self.reason = reason
        self.others_go_on = others_go_on

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (
            *(self.rank, self.host, self.step, self.reason),
            self.others_go_on,
        )


class ServerLost(CollectiveError):
    """A parameter server died, froze or left while workers still needed it.

    Attributes:
        index: Its index among the servers.
        address: Its address, `"host:port"`.
        step: The last step that this worker had finished.
        reason: What was observed, e.g. `"its connection was closed"`.
        held_weights: Whether it held a part of the weights, as with `mode="async"`.
    """

    def __init__(
        self,
        index: int,
        address: str,
        step: int,
        reason: str,
        held_weights: bool = True,
    ) -> None:
        then = (
            "The workers can't take a step without it, but they hold all weights. Look "
            f"at the output of server {index} for the first error, then start the job "
            "again."
        )
        if held_weights:
            then = (
                "It held a part of the weights. Look at the output of server "
                f"{index} for the first error, then start the job again; with "
                "`snapshot_dir=` a server that is started again goes on from its "
                "snapshot."
            )
        super().__init__(
            f"Server {index} ({address}) was lost at step {step}: {reason}. {then}"
        )
        self.index = index
        self.address = address
        self.step = step
        self.reason = reason
        self.held_weights = held_weights

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (
            *(self.index, self.address, self.step, self.reason),
            self.held_weights,
        )


class CollectiveMismatch(CollectiveError):
    """Ranks called different collectives, or the same one on different data."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """All ranks are alive, but not all of them took part in a collective in time."""


class SharedMemoryFull(CollectiveError, OSError):
    """The host has no memory left that its workers could share for a collective."""


class TransportClosed(CollectiveError):
    """The communicator was used after it had been closed."""


class IncompatibleVersionError(KerasDistError):
    """The installed version of Keras or TensorFlow isn't supported.

    Raised before anything is acquired, and before anything in them is changed.

    Attributes:
        version: The version that is installed.
        faults: The functions that are missing or different, one sentence each.
        fits: The versions that are supported, e.g. `"3.14 to 3.15"`.
    """

    package = "package"

    def __init__(self, version: str, faults: Sequence[str], fits: str) -> None:
        name = self.package
        super().__init__(
            f"kerasdist doesn't support {name} {version}: functions that kerasdist "
            f"wraps are missing or have changed. Received: {name} {version}, where "
            + "; ".join(faults)
            + f". Expected {name} {fits}. Install one of these versions of {name}, or "
            "a kerasdist that supports this one."
        )
        self.version = version
        self.faults = tuple(faults)
        self.fits = fits

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.version, self.faults, self.fits)


class IncompatibleKerasError(IncompatibleVersionError):
    """The installed version of Keras isn't supported."""

    package = "Keras"


class IncompatibleTensorFlowError(IncompatibleVersionError):
    """The installed version of TensorFlow isn't supported."""

    package = "TensorFlow"


class FunctionError(KerasDistError):
    """A function that `kerasdist.run` called in workers has failed, or was ended.

    `__cause__` is the exception that it raised there, if that can be pickled.

    Attributes:
        rank: The rank that failed first; None if that was a server, or isn't known.
        traceback: The traceback there as text; empty if it left none.
    """

    def __init__(
        self, message: str, rank: int | None = None, traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.traceback = traceback

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.rank, self.traceback)


class SnapshotError(KerasDistError):
    """A server's snapshot is damaged, belongs to another job, or can't be written.

    Or the checkpoint of a preempted elastic job is damaged, or is one of another model,
    other callbacks or other data.
    """


class PlanError(KerasDistError, ValueError):
    """A model doesn't fit into the memory of the devices, however it is cut.

    Raised before a weight exists.

    Attributes:
        advice: Changes that would make it fit, one sentence each; each was searched
            for with the model's costs. Empty if nothing was found.
        plan: The cut that is nearest to fitting, with the figures of each layer and
            device (`kerasdist.placement.plan.Plan`); None where it isn't known.
    """

    def __init__(
        self, message: str, advice: tuple[str, ...] = (), plan: object = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.advice = tuple(advice)
        self.plan = plan

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.advice, self.plan)
