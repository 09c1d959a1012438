"""What the data-parallel strategies have in common: one job of several workers."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from kerasdist import _keras, _tf
from kerasdist._tf import patches
from kerasdist.cluster import Cluster
from kerasdist.collectives import Communicator
from kerasdist.strategies.cluster_resolver import resolver_of
from kerasdist.strategies.sync.extended import SynchronousExtended
from kerasdist.strategies.sync.job import StrategyJob, forget, leave_at_exit

__all__ = ["DataParallelStrategy", "Options"]

_Self = TypeVar("_Self", bound="DataParallelStrategy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a strategy is asked for, but for who connects its workers.

    Attributes:
        initial_state: What `fit` does when the workers hold different weights before
            its first step: "check" or "broadcast".
        shard: Whose the data are that Keras is given: "rows" of what is the same on all
            workers, or "off": each worker's own.
        data: What is done if they aren't the same: "auto", "same" or "chief".
        bucket_size: Bytes of gradients that are sent at once.
        compression: None, "bf16" or "fp16": how gradients cross the network.

    Raises:
        ValueError: One of them is wrong.
    """

    initial_state: str
    shard: str
    data: str
    bucket_size: int
    compression: str | None

    def __post_init__(self) -> None:
        if self.shard not in ("rows", "off"):
            raise ValueError(
                f"`shard` must be 'rows' or 'off'. Received: shard={self.shard!r}."
            )
        if self.data not in ("auto", "same", "chief"):
            raise ValueError(
                "`data` must be 'auto', 'same' or 'chief'. "
                f"Received: data={self.data!r}."
            )
        if isinstance(self.bucket_size, bool) or not (
            isinstance(self.bucket_size, int) and self.bucket_size > 0
        ):
            raise ValueError(
                "`bucket_size` must be a positive number of bytes. "
                f"Received: bucket_size={self.bucket_size!r}."
            )
        if self.compression not in (None, "bf16", "fp16"):
            raise ValueError(
                "`compression` must be None, 'bf16' or 'fp16'. "
                f"Received: compression={self.compression!r}."
            )
        if self.initial_state not in ("check", "broadcast"):
            raise ValueError(
                "`initial_state` must be 'check' or 'broadcast'. "
                f"Received: initial_state={self.initial_state!r}."
            )


class DataParallelStrategy(tf.distribute.Strategy):
    """A strategy whose workers train copies of one model on parts of the data.

    Subclasses connect the workers, and call this constructor with the result. It owns
    the job from then on, also if it raises.

    Args:
        place: This task's place among the others, as the settings have it.
        devices: Canonical names of this worker's devices, one replica each.
        job: The connected workers.
        options: What was asked for.
        extended: The class of the strategy's inside.
    """

    # TensorFlow's MirroredExtended asks its strategy for it.
    _collective_key_base = 0

    def __init__(
        self,
        place: Cluster,
        devices: Sequence[str],
        job: StrategyJob,
        options: Options,
        extended: Callable[..., Any] = SynchronousExtended,
    ) -> None:
        self._job = job
        self._place = place
        try:
            super().__init__(
                extended(
                    self,
                    devices,
                    job,
                    initial_state=options.initial_state,
                    shards=options.shard == "rows",
                    data=options.data,
                    bucket_size=options.bucket_size,
                    compression=options.compression,
                )
            )
            _keras.install()
            patches.install("core")
            _keras.begin_use(self.extended.keras_hooks)
            if job.communicator.size > 1:
                _tf.set_global_seed_if_none(self.extended.common_seed)
        except BaseException as error:
            job.close(error)
            raise
        # Without a reference to the strategy: it may be collected.
        self._finalizer = weakref.finalize(self, job.close)
        self._finalizer.atexit = False
        leave_at_exit(job)

    @property
    def rank(self) -> int:
        """This worker's index, 0..size-1; the chief is 0."""
        return self._job.communicator.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._job.communicator.size

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes what is written once for all."""
        return self.rank == 0

    @property
    def cluster_resolver(self) -> Any:
        """The tasks of the job: `task_type`, `task_id`, `cluster_spec()`.

        A `tf.distribute.cluster_resolver.ClusterResolver`, as scripts ask it of
        `MultiWorkerMirroredStrategy` to find out who they are.
        """
        return resolver_of(self._place, self.rank, self.size)

    @property
    def communicator(self) -> Communicator:
        """Collectives between the workers, on numpy arrays."""
        return self._job.communicator

    def close(self) -> None:
        """Leave the job: give back sockets, threads and memory. Can be called twice.

        The model keeps its weights and can be used without the strategy. Workers
        that still wait for this one get `WorkerLost`.
        """
        _keras.end_use(self.extended.keras_hooks)
        self._finalizer()
        forget(self._job)

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        # Keras copies models' attributes; there is one strategy all the same.
        del memo
        return self
