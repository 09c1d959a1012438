"""Faults of real worker processes end every other one, in time, and say why."""

from __future__ import annotations

import json
import signal
import socket
import time

import pytest

from workers import FULL_STDERR, Workers

pytestmark = pytest.mark.timeout(90)

# Seconds after which a silent rank is lost. Long, but where silence is what is
# tested: on a busy machine a rank may be silent for a second or two.
LONG, HEARTBEAT = 20.0, 3.0
# How long the others may take to notice a process that has ended, in seconds. It
# takes milliseconds; the rest is for a machine that is busy. By its silence they
# would notice after LONG.
AT_ONCE = 15.0

LOOP = """
    import json, os, signal, sys, time
    import numpy as np
    from kerasdist import errors
    from kerasdist.cluster import resolve
    from kerasdist.collectives import connect
    from kerasdist.transport import Timeouts

    cluster = resolve()
    rank = cluster.rank
    job = connect(
        cluster,
        transport=os.environ["TRANSPORT"],
        timeouts=Timeouts(
            startup=40, collective=40, heartbeat=float(os.environ["HEARTBEAT"])),
        host=os.environ.get("HOST"),
    )
    communicator = job.communicator
    assert job.transport == os.environ["TRANSPORT"], job.transport

    def fault(step):
        pass

    try:
        exec(os.environ.get("FAULT", ""))
        for step in range(1, 1_000_000):
            communicator.step = step
            fault(step)
            total, = communicator.all_reduce([np.full(20_000, rank, np.float32)])
            assert (total == sum(range(cluster.size))).all()
            if step == 5:
                print("LOOPING", flush=True)
    except errors.CollectiveError as error:
        seen = time.time()
        job.close(error)
        print("RESULT", json.dumps(dict(
            error=type(error).__name__, text=str(error), seen=seen, at=step,
            **{k: v for k, v in vars(error).items() if k in (
                "rank", "host", "step", "reason")})), flush=True)
    except BaseException as error:
        job.close(error)
        raise
"""

# Each rank's host as a letter, by what the ranks then talk through.
GROUPS = {
    "tcp": "abcd",
    "shared_memory": "aaaa",
    "hierarchical": "aabb",
}


def job_of(transport, size, fault="", heartbeat=LONG, **options):
    layout = GROUPS[transport]

    def env(rank):
        return {
            "TRANSPORT": transport,
            "HOST": layout[rank],
            "FAULT": fault,
            "HEARTBEAT": str(heartbeat),
        }

    return Workers(LOOP, size, env=env, **options)


def check_lost(survivors, victim, address):
    for survivor in survivors:
        assert survivor.returncode == 0, survivor.output
        result = survivor.result
        assert result["error"] == "WorkerLost", result
        assert (result["rank"], result["host"]) == (victim, address)
        # Ranks are at most one step apart.
        assert abs(result["step"] - result["at"]) <= 1
        assert f"Rank {victim} ({address}) was lost at step" in result["text"]


SITES = [
    ("tcp", 2, 0),
    ("tcp", 3, 1),
    ("tcp", 4, 0),
    ("tcp", 4, 2),
    ("shared_memory", 2, 1),
    ("shared_memory", 4, 0),
    ("shared_memory", 4, 3),
    ("hierarchical", 4, 0),
    ("hierarchical", 4, 1),
    ("hierarchical", 4, 2),
    ("hierarchical", 4, 3),
]


@pytest.mark.parametrize(("transport", "size", "victim"), SITES)
def test_a_killed_rank_is_noticed_by_all_at_once(transport, size, victim):
    with job_of(transport, size) as job:
        for rank in range(size):
            job.wait_for_line(rank, "LOOPING")
        killed = time.time()
        job.kill(victim, signal.SIGKILL)
        survivors = [w for w in job.wait() if w.rank != victim]
    check_lost(survivors, victim, job.addresses[victim])
    for survivor in survivors:
        assert survivor.result["seen"] - killed < AT_ONCE
        assert survivor.result["reason"].startswith("its connection ended (")


@pytest.mark.parametrize(("transport", "victim"), [("tcp", 0), ("shared_memory", 1)])
def test_a_killed_rank_whose_children_live_is_noticed_at_once(transport, victim):
    """Such as the processes that load its data: they have copies of its sockets."""
    fault = f"""
if rank == {victim} and os.fork() == 0:
    signal.pause()
"""
    with job_of(transport, 3, fault, handover=False) as job:
        for rank in range(3):
            job.wait_for_line(rank, "LOOPING")
        killed = time.time()
        job.kill(victim, signal.SIGKILL)
        survivors = [job.wait_one(rank) for rank in range(3) if rank != victim]
        host, port = job.addresses[victim].split(":")
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind((host, int(port)))
            again.listen()
    check_lost(survivors, victim, job.addresses[victim])
    for survivor in survivors:
        assert survivor.result["seen"] - killed < AT_ONCE


@pytest.mark.parametrize(
    ("transport", "size", "victim"),
    [("tcp", 3, 0), ("tcp", 4, 2), ("shared_memory", 3, 1), ("hierarchical", 4, 3)],
)
def test_a_frozen_rank_is_noticed_by_all_in_time_and_finds_out_itself(
    transport, size, victim
):
    with job_of(transport, size, heartbeat=HEARTBEAT) as job:
        for rank in range(size):
            job.wait_for_line(rank, "LOOPING")
        frozen = time.time()
        job.kill(victim, signal.SIGSTOP)
        survivors = [job.wait_one(r) for r in range(size) if r != victim]
        check_lost(survivors, victim, job.addresses[victim])
        for survivor in survivors:
            after = survivor.result["seen"] - frozen
            assert HEARTBEAT / 2 < after < LONG
            assert survivor.result["reason"].startswith(
                "nothing was received from it for"
            )
        job.kill(victim, signal.SIGCONT)
        late = job.wait_one(victim, deadline=40)
    # Nobody else is to blame, also where it is the chief that was frozen.
    assert (late.result["error"], late.result["rank"]) == ("WorkerLost", victim)


def test_a_chief_whose_output_nobody_reads_names_who_was_lost():
    """As with `2>&1 | less`: what it would log mustn't come before what it tells."""
    fault = FULL_STDERR + "if rank == 0: fill_stderr()"
    with job_of("tcp", 3, fault, heartbeat=HEARTBEAT) as job:
        for rank in range(3):
            job.wait_for_line(rank, "LOOPING")
        killed = time.time()
        job.kill(2, signal.SIGKILL)
        survivor = job.wait_one(1)
        chief = json.loads(job.wait_for_line(0, "RESULT").partition(" ")[2])
    check_lost([survivor], 2, job.addresses[2])
    assert survivor.result["seen"] - killed < AT_ONCE
    assert (chief["error"], chief["rank"]) == ("WorkerLost", 2)


@pytest.mark.parametrize("transport", GROUPS)
@pytest.mark.parametrize("victim", [0, 3])
def test_the_error_of_a_script_is_told_to_the_others(transport, victim):
    fault = f"""
def fault(step):
    if rank == {victim} and step == 7:
        raise OSError("disk is full")
"""
    with job_of(transport, 4, fault) as job:
        finished = job.wait()
    failed = finished.pop(victim)
    assert failed.returncode == 1
    assert failed.output.rstrip().endswith("OSError: disk is full")
    check_lost(finished, victim, job.addresses[victim])
    for survivor in finished:
        assert (
            survivor.result["reason"] == "its script ended with OSError: disk is full"
        )


@pytest.mark.parametrize("transport", GROUPS)
def test_a_rank_that_leaves_early_is_named(transport):
    fault = """
def fault(step):
    if rank == 2 and step == 7:
        job.close()
        sys.exit()
"""
    with job_of(transport, 4, fault) as job:
        finished = job.wait()
    assert finished.pop(2).returncode == 0
    check_lost(finished, 2, job.addresses[2])
    for survivor in finished:
        assert survivor.result["step"] == 7
        assert "it closed its strategy while others" in survivor.result["reason"]


@pytest.mark.parametrize("transport", GROUPS)
def test_mismatched_collectives_end_all_ranks(transport):
    fault = """
def fault(step):
    if rank == 1 and step == 7:
        communicator.barrier()
"""
    with job_of(transport, 4, fault) as job:
        results = [worker.result for worker in job.wait()]
    assert {r["error"] for r in results} == {"CollectiveMismatch"}
    (text,) = {r["text"] for r in results}
    assert f"rank 1 ({job.addresses[1]}): #7 barrier()" in text
    assert "#7 all_reduce(op='sum', dtype=float32, elements=20000)" in text
    assert "at step 7" in text


@pytest.mark.parametrize("transport", GROUPS)
def test_a_closed_data_connection_ends_all_ranks(transport):
    """Somebody between two workers drops a connection: both are alive."""
    fault = """
def fault(step):
    if rank == 3 and step == 7:
        import gc, socket
        from kerasdist.transport.sockets import SocketTransport
        for transport in gc.get_objects():
            if isinstance(transport, SocketTransport):
                for sock in transport.sockets():
                    sock.shutdown(socket.SHUT_RDWR)
"""
    with job_of(transport, 4, fault) as job:
        results = [worker.result for worker in job.wait()]
    assert {r["error"] for r in results} == {"WorkerLost"}
    # One word on it, the chief's; at either end the other one is suspected.
    assert len({r["text"] for r in results}) == 1
    assert "connection" in results[0]["reason"]


@pytest.mark.parametrize("transport", GROUPS)
def test_garbage_in_a_data_connection_ends_all_ranks(transport):
    fault = """
def fault(step):
    if rank == 3 and step == 7:
        import contextlib, gc
        from kerasdist.transport.sockets import SocketTransport
        for transport in gc.get_objects():
            if isinstance(transport, SocketTransport):
                for sock in transport.sockets():
                    # A rank that has read the first may have ended the job by now.
                    with contextlib.suppress(OSError):
                        sock.send(bytes(range(200)))
"""
    with job_of(transport, 4, fault) as job:
        results = [worker.result for worker in job.wait()]
    assert {r["error"] for r in results} == {"CollectiveError"}
    (text,) = {r["text"] for r in results}
    assert "at step 7: The received bytes aren't a kerasdist frame." in text
    assert "in #7 all_reduce(" in text


@pytest.mark.parametrize("victim", [0, 2])
def test_garbage_in_a_control_connection_ends_all_ranks(victim):
    fault = f"""
def fault(step):
    if rank == {victim} and step == 7:
        import gc
        from kerasdist.transport.liveness.control_connection import ControlConnection
        for line in gc.get_objects():
            if isinstance(line, ControlConnection):
                line.sock.send(b"x" * 100)
"""
    with job_of("tcp", 3, fault) as job:
        results = [worker.result for worker in job.wait()]
    assert {r["error"] for r in results} == {"WorkerLost"}
    assert {(r["rank"], r["host"]) for r in results if r["at"] != 0} >= {
        (victim, job.addresses[victim])
    }
    assert "The received bytes aren't a kerasdist frame" in json.dumps(results)


def test_ctrl_c_in_one_rank_ends_all():
    with job_of("tcp", 3) as job:
        for rank in range(3):
            job.wait_for_line(rank, "LOOPING")
        job.kill(1, signal.SIGINT)
        finished = job.wait()
    interrupted = finished.pop(1)
    assert interrupted.output.rstrip().endswith("KeyboardInterrupt")
    check_lost(finished, 1, job.addresses[1])
    for survivor in finished:
        assert "KeyboardInterrupt" in survivor.result["reason"]


def test_a_process_that_just_exits_is_named():
    fault = """
def fault(step):
    if rank == 1 and step == 7:
        os._exit(3)
"""
    with job_of("shared_memory", 3, fault) as job:
        finished = job.wait()
    assert finished.pop(1).returncode == 3
    check_lost(finished, 1, job.addresses[1])


# No memory for segments: files of these workers, also those in memory, may have 1 MB.
LITTLE_MEMORY = ["prlimit", f"--fsize={1 << 20}"]


@pytest.mark.parametrize("transport", ["shared_memory", "hierarchical"])
@pytest.mark.parametrize("victims", [[1], [0, 1, 2, 3]])
def test_no_memory_to_share_is_an_error_on_every_rank(transport, victims):
    fault = """
def fault(step):
    if step == 4:
        communicator.all_reduce([np.zeros(2_000_000, np.uint8)])
"""

    def prefix(rank):
        return LITTLE_MEMORY if rank in victims else []

    with job_of(transport, 4, fault, prefix=prefix) as job:
        results = [worker.result for worker in job.wait()]
    assert {r["error"] for r in results} == {"SharedMemoryFull"}
    (text,) = {r["text"] for r in results}
    assert any(
        text.startswith(f"rank {r} ({job.addresses[r]}) in #4 ") for r in victims
    )
    assert " at step 4: There is no memory for a buffer that the workers of" in text
    assert "transport='tcp'" in text
