import json
import signal
import socket
import time

import pytest

from workers import FULL_STDERR, Workers

# Seconds after which a silent rank is lost. Long, but where silence is what is
# tested: on a busy machine a rank may be silent for a second or two.
LONG, HEARTBEAT = 40.0, 3.0
# How long the others may take to notice a process that has ended, in seconds. It
# takes milliseconds; the rest is for a machine that is busy. By its silence they
# would notice after LONG.
AT_ONCE = 30.0

LOOP = """
    import gc, json, os, resource, signal, socket, sys, time
    import numpy as np
    from kerasdist import errors
    from kerasdist.cluster import resolve
    from kerasdist.collectives import connect
    from kerasdist.transport.deadline import Timeouts
    from kerasdist.transport.liveness.heartbeat import ControlConnection
    from kerasdist.transport.sockets import SocketTransport

    transport, layout, heartbeat, *cases = sys.argv[1:]
    cluster = resolve()
    rank = cluster.rank

    def sockets(kind):
        for each in gc.get_objects():
            if isinstance(each, SocketTransport) and kind is SocketTransport:
                yield from each.sockets()
            elif isinstance(each, ControlConnection) and kind is ControlConnection:
                yield each.sock

    def each_socket(kind, work):
        for sock in sockets(kind):
            # Of an earlier job; or a rank that has read the first one's garbage may
            # have ended the job by now.
            try:
                work(sock)
            except OSError:
                pass

    class Left(Exception):
        pass

    def fault(case, job):
        what, _, victims = case.partition(" ")
        if str(rank) not in victims:
            if what == "memory":
                job.communicator.all_reduce([np.zeros(2_000_000, np.uint8)])
        elif what == "error":
            raise OSError("disk is full")
        elif what == "leave":
            raise Left
        elif what == "mismatch":
            job.communicator.barrier()
        elif what == "cut":
            each_socket(SocketTransport, lambda s: s.shutdown(socket.SHUT_RDWR))
        elif what == "garbage":
            each_socket(SocketTransport, lambda s: s.send(bytes(range(200))))
        elif what == "control":
            each_socket(ControlConnection, lambda s: s.send(b"x" * 100))
        elif what == "memory":
            # Files of this process, also those in memory, may have 1 MB.
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
            try:
                job.communicator.all_reduce([np.zeros(2_000_000, np.uint8)])
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def run(case):
        job = connect(
            cluster,
            transport=transport,
            timeouts=Timeouts(startup=60, collective=60, heartbeat=float(heartbeat)),
            host=layout[rank],
        )
        assert job.transport == transport, job.transport
        try:
            exec(os.environ.get("FAULT", ""))
            for step in range(1, 1_000_000):
                job.communicator.step = step
                if step == 7:
                    fault(case, job)
                total, = job.communicator.all_reduce([np.full(20_000, rank, "f4")])
                assert (total == sum(range(cluster.size))).all()
                if step == 5:
                    print("LOOPING", flush=True)
        except errors.CollectiveError as error:
            seen = time.time()
            job.close(error)
            return dict(
                error=type(error).__name__, text=str(error), seen=seen, at=step,
                **{k: v for k, v in vars(error).items() if k in (
                    "rank", "host", "step", "reason")})
        except Left:
            job.close()
        except OSError as error:
            job.close(error)
        except BaseException as error:
            job.close(error)
            raise

    for case in cases or [""]:
        print("RESULT", json.dumps(run(case)), flush=True)
"""

# Each rank's host as a letter, by what the ranks then talk through.
GROUPS = {"tcp": "abcd", "shared_memory": "aaaa", "hierarchical": "aabb"}


def job_of(transport, size, fault="", heartbeat=LONG, cases=(), **options):
    args = [transport, GROUPS[transport], str(heartbeat), *cases]
    return Workers(LOOP, size, args, {"FAULT": fault}, deadline=120.0, **options)


def loop(job):
    job.wait_for_lines("LOOPING", job.size)


def check_lost(results, victim, address):
    for result in results:
        assert result["error"] == "WorkerLost", result
        assert (result["rank"], result["host"]) == (victim, address)
        # Ranks are at most one step apart.
        assert abs(result["step"] - result["at"]) <= 1
        assert f"Rank {victim} ({address}) was lost at step" in result["text"]


# Children, as those that load its data, have copies of its sockets.
@pytest.mark.parametrize(
    ("transport", "size", "victim", "children"),
    [
        ("tcp", 3, 0, True),
        ("tcp", 4, 2, False),
        ("shared_memory", 3, 1, True),
        ("hierarchical", 4, 0, False),
    ],
)
def test_a_killed_rank_is_noticed_by_all_at_once(transport, size, victim, children):
    fault = f"if rank == {victim} and os.fork() == 0: signal.pause()"
    with job_of(
        transport, size, fault if children else "", handover=not children
    ) as job:
        loop(job)
        killed = time.time()
        job.kill(victim, signal.SIGKILL)
        survivors = [job.wait_one(rank) for rank in range(size) if rank != victim]
        if children:
            host, port = job.addresses[victim].split(":")
            with socket.socket() as again:
                again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                again.bind((host, int(port)))
                again.listen()
    results = [survivor.result for survivor in survivors]
    check_lost(results, victim, job.addresses[victim])
    for result in results:
        assert result["seen"] - killed < AT_ONCE
        assert result["reason"].startswith("its connection ended (")


def test_a_frozen_chief_is_noticed_by_all_in_time_and_finds_out_itself():
    with job_of("hierarchical", 4, heartbeat=HEARTBEAT) as job:
        loop(job)
        frozen = time.time()
        job.kill(0, signal.SIGSTOP)
        results = [job.wait_one(rank).result for rank in (1, 2, 3)]
        check_lost(results, 0, job.addresses[0])
        for result in results:
            assert HEARTBEAT / 2 < result["seen"] - frozen < LONG
            assert result["reason"].startswith("nothing was received from it for")
        job.kill(0, signal.SIGCONT)
        late = job.wait_one(0).result
    # Nobody else is to blame.
    assert (late["error"], late["rank"]) == ("WorkerLost", 0)


def test_a_chief_whose_output_nobody_reads_names_who_was_lost():
    """As with `2>&1 | less`: what it would log mustn't come before what it tells."""
    fault = FULL_STDERR + "if rank == 0: fill_stderr()"
    with job_of("tcp", 3, fault) as job:
        loop(job)
        killed = time.time()
        job.kill(2, signal.SIGKILL)
        survivor = job.wait_one(1)
        chief = json.loads(job.wait_for_line(0, "RESULT").partition(" ")[2])
    check_lost([survivor.result], 2, job.addresses[2])
    assert survivor.result["seen"] - killed < AT_ONCE
    assert (chief["error"], chief["rank"]) == ("WorkerLost", 2)


def test_ctrl_c_in_one_rank_ends_all():
    with job_of("tcp", 3) as job:
        loop(job)
        job.kill(1, signal.SIGINT)
        finished = job.wait()
    interrupted = finished.pop(1)
    assert interrupted.output.rstrip().endswith("KeyboardInterrupt")
    results = [each.result for each in finished]
    check_lost(results, 1, job.addresses[1])
    for result in results:
        assert "KeyboardInterrupt" in result["reason"]


CASES = ["error 0", "error 3", "leave 2", "mismatch 1", "cut 3", "garbage 3"]
CONTROL = ["control 0", "control 2"]
MEMORY = ["memory 1", "memory 0123"]


@pytest.mark.parametrize(
    ("transport", "cases"),
    [
        ("tcp", CASES + CONTROL),
        ("shared_memory", CASES + MEMORY),
        ("hierarchical", [case for case in CASES if "cut" not in case] + MEMORY),
    ],
)
def test_a_fault_of_one_rank_ends_all_with_the_same_word(transport, cases):
    """One after the other: the same processes connect again after each."""
    with job_of(transport, 4, cases=cases) as job:
        finished = job.succeed()
    by_case = zip(*(worker.results for worker in finished), strict=True)
    for case, results in zip(cases, by_case, strict=True):
        what, _, victims = case.partition(" ")
        results, victim = list(results), int(victims[0])
        address = job.addresses[victim]
        if what in ("error", "leave"):
            assert results.pop(victim) is None
            check_lost(results, victim, address)
            (reason,) = {r["reason"] for r in results}
            if what == "error":
                assert reason == "its script ended with OSError: disk is full"
            else:
                assert {r["step"] for r in results} == {7}
                assert "it closed its strategy while others" in reason
            continue
        kinds, texts = ({r[key] for r in results} for key in ("error", "text"))
        if what == "control":
            assert kinds == {"WorkerLost"}
            named = {(r["rank"], r["host"]) for r in results if r["at"] != 0}
            assert named >= {(victim, address)}
            assert "The received bytes aren't a kerasdist frame" in json.dumps(results)
            continue
        # One word on it, the chief's.
        (text,) = texts
        if what == "mismatch":
            assert kinds == {"CollectiveMismatch"}
            assert f"rank 1 ({address}): #7 barrier()" in text
            assert "#7 all_reduce(op='sum', dtype=float32, elements=20000)" in text
            assert "at step 7" in text
        elif what == "cut":
            # Somebody between two workers drops a connection: both are alive, and at
            # either end the other one is suspected.
            assert kinds == {"WorkerLost"}
            assert "connection" in results[0]["reason"]
        elif what == "garbage":
            assert kinds == {"CollectiveError"}
            assert "at step 7: The received bytes aren't a kerasdist frame." in text
            assert "in #7 all_reduce(" in text
        else:
            assert kinds == {"SharedMemoryFull"}
            assert any(
                text.startswith(f"rank {r} ({job.addresses[int(r)]}) in #7 ")
                for r in victims
            )
            assert " at step 7: There is no memory for a buffer that the w" in text
            assert "transport='tcp'" in text
