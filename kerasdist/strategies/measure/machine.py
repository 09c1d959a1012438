"""The use of a worker's machine: cores, memory, swap, network, disk and GPUs.

psutil, and NVIDIA's library where it is installed (`pip install kerasdist[gpu]`), read
counters that the system keeps anyway. They are read between two steps, at most once in
a second.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil

# A shorter time is added to the next one: counters are too coarse for it.
LEAST_SECONDS = 1.0
# The fields that aren't sums over time.
_LARGEST = ("cores", "memory", "host_memory", "gpus", "gpu_memory")


class MachineUsage(NamedTuple):
    """A worker's use of its machine.

    `host_memory`, `swapped` and `network` are of the whole host, with its other workers
    and programs.

    Attributes:
        seconds: The time that it is of.
        cpu: Seconds of all cores, of this process and its children.
        cores: Number of cores that this process may use.
        memory: Largest number of bytes of this process and its children.
        host_memory: Largest part of the host's memory that is in use, 0 to 1.
        swapped: Bytes moved to and from swap.
        network: Bytes sent and received, except to itself.
        disk: Bytes that this process has read from disks and written to them.
        gpus: Number of GPUs that it may use.
        gpu: Seconds in which they were busy, the sum over all of them.
        gpu_memory: Largest number of bytes in use, the sum over all of them.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    cores: float = 0.0
    memory: float = 0.0
    host_memory: float = 0.0
    swapped: float = 0.0
    network: float = 0.0
    disk: float = 0.0
    gpus: float = 0.0
    gpu: float = 0.0
    gpu_memory: float = 0.0

    def plus(self, other: MachineUsage) -> MachineUsage:
        """Return that of both times together."""
        return MachineUsage(
            *(
                max(mine, its) if name in _LARGEST else mine + its
                for name, mine, its in zip(self._fields, self, other, strict=True)
            )
        )

    def per_second(self, name: str) -> float:
        """Return a sum divided by the time, as `cpu`: the number of busy cores."""
        return float(getattr(self, name)) / self.seconds if self.seconds else 0.0


class MachineReader:
    """Reads what this process uses.

    Args:
        now: A clock, in seconds.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._process = psutil.Process()
        self._gpus = _gpus()
        self._read = now()
        self._counted = self._counters()
        # By process: of one that has ended the sum would fall.
        self._cpu: dict[int, float] = {}
        self._processes()

    def take(self) -> MachineUsage:
        """Return the use since the last call; empty if that was under a second ago."""
        now = self._now()
        seconds = now - self._read
        if seconds < LEAST_SECONDS:
            return MachineUsage()
        self._read = now
        before, self._counted = self._counted, self._counters()
        cpu, memory = self._processes()
        busy, gpu_memory = self._gpu_use()
        return MachineUsage(
            seconds=seconds,
            cpu=cpu,
            cores=float(len(os.sched_getaffinity(0))),
            memory=memory,
            host_memory=psutil.virtual_memory().percent / 100,
            gpus=float(len(self._gpus)),
            # The driver's own mean over its last second, or less.
            gpu=busy * seconds,
            gpu_memory=gpu_memory,
            **{name: max(self._counted[name] - before[name], 0.0) for name in before},
        )

    def _counters(self) -> dict[str, float]:
        """Return counters of bytes; 0 where the system has none."""
        found = dict.fromkeys(("swapped", "network", "disk"), 0.0)
        unknown = (psutil.Error, OSError, AttributeError, RuntimeError)
        with contextlib.suppress(*unknown):
            swap = psutil.swap_memory()
            found["swapped"] = float(swap.sin + swap.sout)
        with contextlib.suppress(*unknown):
            cards = psutil.net_io_counters(pernic=True).items()
            found["network"] = float(
                sum(c.bytes_sent + c.bytes_recv for name, c in cards if name != "lo")
            )
        with contextlib.suppress(*unknown):
            disk = self._process.io_counters()
            found["disk"] = float(disk.read_bytes + disk.write_bytes)
        return found

    def _processes(self) -> tuple[float, float]:
        """Return the cores' new seconds, and the bytes, of the process and children."""
        seconds = memory = 0.0
        known, self._cpu = self._cpu, {}
        every = [self._process]
        with contextlib.suppress(psutil.Error):
            every += self._process.children(recursive=True)
        for process in every:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                cpu = times.user + times.system
                memory += process.memory_info().rss
                seconds += max(cpu - known.get(process.pid, 0.0), 0.0)
                self._cpu[process.pid] = cpu
        return seconds, memory

    def _gpu_use(self) -> tuple[float, float]:
        """Return the busy part of each GPU and its bytes in use, added up."""
        busy = memory = 0.0
        for library, gpu in self._gpus:
            with contextlib.suppress(library.NVMLError):
                busy += library.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
                memory += library.nvmlDeviceGetMemoryInfo(gpu).used
        return busy, memory


def _gpus() -> list[tuple[Any, Any]]:
    """Return NVIDIA's library with each GPU that this process may use."""
    try:
        import pynvml
    except ImportError:
        return []
    found = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        every = map(str, range(pynvml.nvmlDeviceGetCount()))
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        for name in every if chosen is None else chosen.split(","):
            if name.strip().isdigit():
                gpu = pynvml.nvmlDeviceGetHandleByIndex(int(name))
            else:  # after an unknown one CUDA uses no other, and this raises
                gpu = pynvml.nvmlDeviceGetHandleByUUID(name.strip())
            found.append((pynvml, gpu))
    return found
