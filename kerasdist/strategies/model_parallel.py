"""`ModelParallelStrategy`: the layers of one model on several devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kerasdist import _tf
from kerasdist._keras.placement.describe import describe
from kerasdist._keras.placement.layers import LayerFacts
from kerasdist.cluster import resolve
from kerasdist.placement.micro_batch_order import Pipeline
from kerasdist.placement.partition import Run
from kerasdist.placement.patterns import Patterns
from kerasdist.placement.plan import Device, Plan, make_plan
from kerasdist.strategies.cluster_resolver import (
    BlockStrategy,
    given_cluster,
    local_ranks,
    refuse_mpi,
    resolver_of,
)
from kerasdist.strategies.devices import (
    Limits,
    check_list,
    find_devices,
    known_devices,
    resolve_devices,
)
from kerasdist.strategies.options import check_installed
from kerasdist.strategies.placed.placed_extended import PlacedExtended, install_hooks
from kerasdist.strategies.placed.placer import Placer, check_micro_batches
from kerasdist.strategies.placed.remote import rendezvous
from kerasdist.strategies.placed.report import PlacementReport
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
                placer = placer_for(mapping, devices, micro_batches, rematerialize)
            super().__init__(PlacedExtended(self, placer, self._remote))
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
            stages=self.devices,
            micro_batches=self.extended.kerasdist.placer.micro_batches,
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


def placer_for(
    placement: Mapping[str, str],
    devices: Sequence[str] | None,
    micro_batches: int,
    rematerialize: bool,
) -> Placer:
    """Return the placer for the placement that a strategy was given.

    Raises:
        TypeError, ValueError: See `ModelParallelStrategy`.
    """
    for pattern, device in placement.items():
        if not (isinstance(pattern, str) and isinstance(device, str)):
            raise TypeError(
                "`placement` must map text to text: patterns of layer paths to names "
                f"of devices. Received: {pattern!r}: {device!r}."
            )
    found = resolve_devices(list(placement.values()), "placement")
    names = list(dict.fromkeys(found))
    if devices is not None:
        check_list(devices)
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
    patterns = Patterns(dict(zip(placement, found, strict=True)))
    return Placer(patterns, names, micro_batches, rematerialize)


# Plans: `kerasdist.plan`, before anything runs, and `placement="auto"`.


def plan(
    model_fn: Callable[[], Any],
    devices: Sequence[str] | None = None,
    *,
    batch_size: int,
    optimizer: Any = None,
    micro_batches: int = 1,
    memory_limits: Limits = None,
    rematerialize: bool = False,
    inputs: Any = None,
) -> Plan:
    """Plan which layer goes to which device, and what each device will hold.

    Nothing is trained and no weights are allocated: the model is built from shapes.
    The plan is the division with the fastest slowest device that fits into the memory
    of every device.

        plan = kerasdist.plan(
            build_model, ["GPU:0", "GPU:1"], batch_size=256, optimizer="adam"
        )
        print(plan)
        strategy = kerasdist.ModelParallelStrategy(placement=plan.placement)

    Args:
        model_fn: Returns the model; takes no arguments. It's called once, or twice if
            it calls the model on data.
        devices: Names as in TensorFlow, in the order in which the layers pass through
            them; by default all logical GPUs, or else all logical CPUs. Devices of
            other machines can be planned for if their memory limits are given.
        batch_size: Rows of a batch (of one replica).
        optimizer: A Keras optimizer or its name. By default the one that the model was
            compiled with; without one there are no slots.
        micro_batches: The number of parts into which a batch is divided.
        memory_limits: Bytes for the model on each device, as numbers or like "16GB":
            one for all, a list, or a mapping from device names. By default what the
            device reports: the limit of a logical device, a GPU's memory, or for each
            CPU device an equal part of the machine's memory (or of its control group's
            limit, if that is less).
        rematerialize: Whether activations are recomputed in the backward pass.
        inputs: The inputs of the model, if it doesn't define them itself (a
            subclassed model that isn't built): shapes without the batch or
            `keras.Input`s, in the structure of `call`'s argument.

    Returns:
        The plan: `placement` (from layer path to device), `layers`, `devices`, `fits`;
        `str(plan)` is a table of the layers and one of the devices.

    Raises:
        ValueError: An argument is wrong, or the model can't be built from shapes.
        PlanError: Nothing fits. The message has the figures, and what would fit.
    """
    run = Run(
        batch_size=batch_size,
        micro_batches=micro_batches,
        rematerialize=bool(rematerialize),
    )
    found = find_devices(devices, memory_limits)
    costs = describe(model_fn, run.part_rows, optimizer, inputs)
    return make_plan(costs, run, found)


# Automatic placements: a plan is made from the model, and its variables are moved.
#
#     1. in the strategy's scope variables are created in host memory
#     2. `fit`, `evaluate` or `predict` is called: by then all layers of the model
#        exist, and the optimizer of `compile` and a batch's rows are known
#     3. before the optimizer is built and before any step is traced, a plan is made,
#        and each variable is moved to its device
#
# From then on it's a placement like any other.


class AutoPlacer(Placer):
    """A placement that is planned when the first model is used.

    Args:
        devices: The devices, in the order of the stages.
        micro_batches: The number of parts into which each batch is divided.
        rematerialize: Whether activations are recomputed instead of kept.
    """

    def __init__(
        self, devices: Sequence[Device], micro_batches: int, *, rematerialize: bool
    ) -> None:
        names = resolve_devices([device.name for device in devices], "devices")
        super().__init__(Patterns({}), names, micro_batches, rematerialize)
        self._described = tuple(devices)
        self._host = _tf.host_of(names[0])

    @property
    def needs_plan(self) -> bool:
        """See `LayerPlacer`."""
        return self.plan is None

    def variable_device(
        self, path: str, called: tuple[str, ...], device: str | None
    ) -> str:
        """See `LayerPlacer`."""
        if self.plan is None and self.stage is None:
            return self._host
        return super().variable_device(path, called, device)

    def device_of(self, layer: LayerFacts) -> str | None:
        """See `LayerPlacer`."""
        # Without a plan, the model is being built.
        return self._host if self.plan is None else super().device_of(layer)

    def make_plan(self, model: Any, rows: int, inputs: Any) -> None:
        """Make the plan for a model; later models are placed by the same plan.

        Args:
            model: The model, all of whose layers are built.
            rows: Rows of a batch.
            inputs: The model's inputs, if it doesn't define them.

        Raises:
            PlanError: The model doesn't fit.
        """
        if self.plan is not None:
            return
        run = Run(
            batch_size=rows,
            micro_batches=self.micro_batches,
            rematerialize=self.rematerialize,
        )
        costs = describe(lambda: model, run.part_rows, inputs=inputs)
        plan = make_plan(costs, run, self._described)
        full = dict(zip((one.name for one in plan.devices), self.devices, strict=True))
        self.patterns = Patterns({p: full[name] for p, name in plan.placement.items()})
        self.plan = plan
