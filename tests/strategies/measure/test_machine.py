"""What a process uses of its machine, beside what it did."""

import os
import subprocess
import sys
import time
import types

import pytest

from kerasdist.strategies.measure.machine import (
    LEAST_SECONDS,
    MachineReader,
    MachineUsage,
)

_CHILD = """
import sys, time
kept = b"x" * (60 << 20)
while time.process_time() < 1.0:
    pass
print(flush=True)
sys.stdin.read()
"""


def test_the_use_of_a_process_and_its_child(tmp_path):
    clock = [100.0]
    reader = MachineReader(now=lambda: clock[0])
    before = time.process_time()
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        with (tmp_path / "file").open("wb") as file:
            file.write(bytes(20 << 20))
            os.fsync(file.fileno())
        clock[0] += LEAST_SECONDS / 2
        assert reader.take() == MachineUsage()
        clock[0] += 19.5
        used = reader.take()
        own = time.process_time() - before
        child.stdin.close()
    assert used.seconds == 20.0
    # The kernel counts ticks of 10 ms.
    assert used.cpu == pytest.approx(own + 1.0, abs=0.5)
    assert used.per_second("cpu") == used.cpu / 20
    assert used.cores == len(os.sched_getaffinity(0))
    assert used.memory > 70 << 20
    assert 0 < used.host_memory < 1
    assert min(used.swapped, used.network) >= 0
    assert used.gpus == used.gpu == 0
    # A file system in memory has no disk.
    assert used.disk == 0 or used.disk >= 20 << 20
    # A child that has ended is forgotten.
    clock[0] += 2
    assert 0 <= reader.take().cpu < 0.5


def test_sums_of_two_times():
    both = MachineUsage(1, 2, 4, 100, 0.5, 10).plus(MachineUsage(3, 2, 2, 50, 0.9, 0))
    assert both == MachineUsage(4, 4, 4, 100, 0.9, 10)
    assert both.per_second("swapped") == 2.5
    assert MachineUsage().per_second("cpu") == 0


@pytest.mark.parametrize(
    ("chosen", "found"),
    [(None, ["0", "1", "2"]), ("2,0", ["2", "0"]), ("1,-1,0", ["1"]), ("GPU-b", "b")],
)
def test_gpus_of_a_library_that_says_what_nvidia_s_does(monkeypatch, chosen, found):
    """There are no GPUs here: the library is one of this test."""

    class Error(Exception):
        pass

    def by_uuid(name):
        if not name.startswith("GPU-"):
            raise Error
        return name.removeprefix("GPU-")

    read = []
    library = types.SimpleNamespace(
        NVMLError=Error,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=str,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUtilizationRates=lambda gpu: types.SimpleNamespace(gpu=50),
        nvmlDeviceGetMemoryInfo=lambda gpu: (
            read.append(gpu) or types.SimpleNamespace(used=1e9)
        ),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    clock = [0.0]
    reader = MachineReader(now=lambda: clock[0])
    clock[0] = 4.0
    used = reader.take()
    assert read == list(found)
    assert used.gpus == len(found)
    assert used.gpu == 2.0 * len(found)
    assert used.gpu_memory == 1e9 * len(found)
