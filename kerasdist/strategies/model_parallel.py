"""`ModelParallelStrategy`: the layers of one model on several devices."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from kerasdist.cluster import resolve
from kerasdist.placement.micro_batch_order import Pipeline
from kerasdist.placement.patterns import Patterns
from kerasdist.placement.plan import Plan
from kerasdist.strategies.cluster_resolver import (
    BlockStrategy,
    given_cluster,
    local_ranks,
    refuse_mpi,
    resolver_of,
)
from kerasdist.strategies.devices import (
    Limits,
    find_devices,
    known_devices,
    resolve_devices,
)
from kerasdist.strategies.options import check_installed
from kerasdist.strategies.placed.placed_extended import PlacedExtended, install_hooks
from kerasdist.strategies.placed.placer import Placer, check_micro_batches
from kerasdist.strategies.placed.remote import rendezvous
from kerasdist.strategies.placed.report import PlacementReport
from kerasdist.strategies.plan import AutoPlacer
from kerasdist.transport.deadline import Timeouts
from kerasdist.transport.log import name_task


class ModelParallelStrategy(BlockStrategy):
    """Trains one model whose layers are on several devices.

    They are devices of this process, or of other machines: see `cluster`.

    Everything of a layer is on its device: variables, the optimizer's slots, forward
    pass, backward pass and update. The numbers are those of the same model without a
    placement.

        strategy = kerasdist.ModelParallelStrategy(
            {"encoder/.*": "GPU:0", "decoder/.*": "GPU:1"}
        )
        with strategy.scope():
            model = build_model()
            model.compile("adam", "mse")
        model.fit(x, y, batch_size=256)

    A pattern is a regular expression, as in `keras.distribution.LayoutMap`, but for the
    path of a layer: it must match the whole path ("my_model/encoder/dense_1"), or its
    end after a "/". "encoder/.*" matches "encoder" and everything inside of it. The
    pattern that matches the innermost layer counts; if several match it, the one that
    equals the path, else the first. A layer that no pattern matches is on the device of
    the layer that calls it, else on the first device.

    Operations between layers (losses, metrics, additions of a functional model) are on
    the device of their largest input.

    Args:
        placement: From patterns of layer paths to devices, as TensorFlow writes them
            ("GPU:0", "CPU:1"); or a plan of `kerasdist.plan`; or "auto": variables are
            created in host memory, and when a model is first used (`fit`, `evaluate`,
            `predict`) a plan is made from its layers, its optimizer and the batch
            size, and each variable is moved to its device. See `plan`.
        devices: All devices that may be used; the first one is for layers that no
            pattern matches. By default those of the placement, in its order; if it's
            empty, all GPUs, or else the CPU.
        micro_batches: The number of parts into which each batch is divided, so that
            devices work at the same time: GPipe's schedule, see `pipeline`.
        rematerialize: Whether only the inputs of a stage are kept of its activations,
            and the others recomputed when their gradients are needed: less memory, and
            a third more computation.
        memory_limits: With "auto": bytes by device, see `kerasdist.plan`.
        cluster: This worker and its peers: a
            `tf.distribute.cluster_resolver.ClusterResolver`, or a dictionary of
            `TF_CONFIG`'s shape. By default `TF_CONFIG`, else Slurm's environment, else
            one worker. Several processes that `mpirun` started are refused: they don't
            know each other's addresses. With several workers rank 0, the chief, drives
            the devices of all: "/job:worker/task:1/GPU:0" is one of task 1's, "GPU:0"
            one of its own. The others run the same script, and serve in this
            constructor until the chief has finished; then their processes end.
            TensorFlow carries the data, and isn't protected by the job's secret: keep
            untrusted hosts off the network.
        cluster_resolver: Another name of `cluster`, as TensorFlow's strategies have it.
        startup_timeout: Seconds until all workers have joined and are connected.
        heartbeat_timeout: Seconds of silence after which a worker is lost.

    Raises:
        ClusterError: The settings are wrong (`AddressInUseError`: this worker's
            port is in use), or this process has driven another cluster before.
        StartupError: Workers are missing, or can't be reached; they are named, with
            the reasons.
        AuthenticationError: Another job, or one with another secret, is at the
            chief's address.
        IncompatibleVersionError: kerasdist can't work with the installed Keras or
            TensorFlow; lists all that is missing or different.
        ValueError: An argument is wrong: a device that doesn't exist, a pattern that
            isn't a regular expression. All faults of an argument are named.
            `fit`, `evaluate` and `predict` raise it before their first step if a
            pattern matches no layer, or with `jit_compile=True`. Or Keras's backend
            isn't TensorFlow.
        PlanError: With "auto", raised by `fit` and the like: nothing fits; has figures.
        TypeError: `placement` isn't a mapping, a plan or "auto".

    A worker that dies while training raises `WorkerLost`: its variables are lost with
    it.
    """

    def __init__(
        self,
        placement: Mapping[str, str] | Plan | str,
        *,
        devices: Sequence[str] | None = None,
        micro_batches: int = 1,
        rematerialize: bool = False,
        memory_limits: Limits = None,
        cluster: Any = None,
        cluster_resolver: Any = None,
        startup_timeout: float = 300.0,
        heartbeat_timeout: float = 30.0,
    ) -> None:
        check_installed()
        self._plan = placement if isinstance(placement, Plan) else None
        placement, devices = unpacked(placement, devices)
        auto = isinstance(placement, str) and placement == "auto"
        mapping = {} if auto else check_mapping(placement)
        check_micro_batches(micro_batches)
        if memory_limits is not None and not auto:
            raise ValueError(
                "Memory limits are for a plan. Received: "
                f"memory_limits={memory_limits!r} with a placement by hand. Leave them "
                "out, or write placement='auto'."
            )
        timeouts = Timeouts(startup=startup_timeout, heartbeat=heartbeat_timeout)
        place = resolve(given_cluster(cluster, cluster_resolver))
        refuse_mpi(
            place,
            "ModelParallelStrategy",
            "`kerasdist run -H`, with `srun` or with TF_CONFIG; or, if its devices are "
            "all of this machine, start the script without `mpirun`",
        )
        name_task(place.task_type, place.task_index, place.rank)
        self._place = place
        self._remote = None if place.size == 1 else rendezvous(place, timeouts)
        try:
            placer: Placer
            if auto:
                planned = find_devices(devices, memory_limits)
                placer = AutoPlacer(planned, micro_batches, rematerialize=rematerialize)
            else:
                placer = placer_for(mapping, devices)
            super().__init__(
                PlacedExtended(
                    self,
                    placer,
                    self._remote,
                    micro_batches=micro_batches,
                    rematerialize=rematerialize,
                )
            )
            install_hooks()
        except BaseException as error:
            if self._remote is not None:
                self._remote.close(error)
            raise

    def close(self) -> None:
        """Let the other workers end. Can be called twice.

        The variables on their devices are gone then: save the model before. Without
        other workers it does nothing. It's called at the end of the script, and of a
        `with` block of the strategy; after an exception in the block the others end
        with it. The block isn't the scope, in which models are created, see
        `RingStrategy.close`.
        """
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self._remote is not None:
            self._remote.close(error)

    @property
    def rank(self) -> int:
        """0: only the chief, which drives the devices of all workers, gets here."""
        return 0

    @property
    def size(self) -> int:
        """The number of workers whose devices the chief drives, itself included.

        It isn't the number of stages: a worker may have several devices.
        """
        return self._place.size

    @property
    def is_chief(self) -> bool:
        """True: the others serve in the constructor."""
        return True

    @property
    def local_rank(self) -> int:
        """0: the chief is the first worker on its host."""
        return 0

    @property
    def local_size(self) -> int:
        """The number of the workers on the chief's host, by their addresses."""
        return len(local_ranks(self._place.workers, 0)) if self._place.workers else 1

    @property
    def cluster_resolver(self) -> Any:
        """The tasks of the job: `task_type`, `task_id`, `cluster_spec()`.

        It exists for scripts written for `MultiWorkerMirroredStrategy`. Only the chief
        gets here.
        """
        return resolver_of(self._place, 0, self._place.size)

    @property
    def plan(self) -> Plan | None:
        """The plan of this placement; None if there is none, or not yet.

        With `placement="auto"` it's made when a model is first used.
        """
        return self.extended.kerasdist.placer.plan or self._plan

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices by full name; the first is for layers without a pattern."""
        return self.extended.kerasdist.placer.devices

    def pipeline(self) -> Pipeline:
        """Return the GPipe schedule of a step; `print(strategy.pipeline())` draws it.

        For stages that take equally long, in the order of `devices`.
        """
        return Pipeline(
            stages=self.devices, micro_batches=self.extended.kerasdist.micro_batches
        )

    def stage(self, device: str) -> contextlib.AbstractContextManager[None]:
        """Place layers that are created, and variables, in a `with` block on a device.

        It takes precedence over patterns that match the same layers. Of nested stages
        the inner one counts.

        Args:
            device: As in the placement.

        Raises:
            ValueError: There's no such device, or it isn't one of `devices`.
        """
        return self.extended.kerasdist.placer.staging(device)

    def placement_report(self) -> PlacementReport:
        """Report which operations ran on which device in the first step of each kind.

        Printed as a table: for each layer how many operations of its forward and
        backward pass ran on which device, and how many bytes are sent from one device
        to another in each step. These are the facts of TensorFlow's runtime, not the
        placement's intentions; small operations that the runtime has merged or moved in
        order to be faster are counted where they ran. Steps are those of `fit`,
        `evaluate`, `predict` and `*_on_batch` of the model that ran last.
        """
        return PlacementReport(steps=dict(self.extended.kerasdist.placer.steps))

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelParallelStrategy:
        # Keras copies models' attributes, but there must be only one strategy.
        del memo
        return self


def unpacked(placement: Any, devices: Sequence[str] | None) -> tuple[Any, Any]:
    """Return the mapping and the devices of a plan; other arguments unchanged."""
    if not isinstance(placement, Plan):
        return placement, devices
    names = [device.name for device in placement.devices]
    return placement.placement, names if devices is None else devices


def check_mapping(placement: Any) -> Mapping[str, str]:
    """Return an explicit placement, after the checks that need no devices.

    Raises:
        TypeError: It isn't a mapping.
    """
    if not isinstance(placement, Mapping):
        raise TypeError(
            "`placement` must be a mapping from patterns of layer paths to "
            f"devices. Received: placement={placement!r}. Write for example "
            "{'encoder/.*': 'GPU:0', 'decoder/.*': 'GPU:1'}."
        )
    return placement


def placer_for(placement: Mapping[str, str], devices: Sequence[str] | None) -> Placer:
    """Return the placer for the placement that a strategy was given.

    Raises:
        TypeError, ValueError: See `ModelParallelStrategy`.
    """
    names, patterns = _places(placement, devices)
    return Placer(patterns, names)


def _places(
    placement: Mapping[str, str], devices: Sequence[str] | None
) -> tuple[list[str], Patterns]:
    """Return all devices, and the patterns with full names of devices."""
    for pattern, device in placement.items():
        if not (isinstance(pattern, str) and isinstance(device, str)):
            raise TypeError(
                "`placement` must map text to text: patterns of layer paths to names "
                f"of devices. Received: {pattern!r}: {device!r}."
            )
    found = resolve_devices(list(placement.values()), "placement")
    names = list(dict.fromkeys(found))
    if devices is not None:
        if isinstance(devices, str) or not devices:
            raise ValueError(
                "`devices` must be a list of device names, at least one. "
                f"Received: devices={devices!r}."
            )
        all_names = list(dict.fromkeys(resolve_devices(devices, "devices")))
        missing = [name for name in names if name not in all_names]
        if missing:
            raise ValueError(
                "`placement` names devices that aren't among `devices`. "
                f"Received: {missing} beside devices={list(devices)!r}. Add them, or "
                "leave `devices` out."
            )
        names = all_names
    if not names:
        known = known_devices()
        names = [name for name in known if ":GPU:" in name] or known[:1]
    return names, Patterns(dict(zip(placement, found, strict=True)))
