"""`transport="mpi"` with a real `mpirun`, and what is said where there is none."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from soak import soak

from pace import bound
from places import SUPPORT
from transports import ALL_TRANSPORTS
from workers import Workers, python_env

# Processes of MPI poll while they wait: a busy machine makes them slow.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def mpirun():
    """The mpirun that was installed with mpi4py's MPI, or the machine's."""
    mine = str(Path(sys.executable).parent)
    found = shutil.which("mpirun", path=os.pathsep.join([mine, os.environ["PATH"]]))
    missing = "mpi4py" if importlib.util.find_spec("mpi4py") is None else "mpirun"
    if missing == "mpirun" and found is not None:
        return found
    if os.environ.get("CI"):
        pytest.fail(f"This test must run in CI, but {missing} isn't installed.")
    pytest.skip(f"{missing} isn't installed")


def elsewhere(folder):
    """A killed process leaves Open MPI's segments behind: not in /dev/shm, please."""
    return {"OMPI_MCA_btl_sm_backing_directory": str(folder)}


def run(mpirun, folder, script, size, *args):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script), encoding="utf-8")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # A file for each process: in one pipe they may cut each other's lines.
    own = f'exec "$@" > "{folder}/output-${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}" 2>&1'
    command = [mpirun, *root, "--oversubscribe", "-n", str(size), "sh", "-c", own, "sh"]
    with subprocess.Popen(
        [*command, sys.executable, str(path), *map(str, args)],
        env=python_env(elsewhere(folder)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        late = False
        try:
            said, _ = process.communicate(timeout=bound(120))
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its processes with it
            said, _ = process.communicate(timeout=bound(20))
            late = True
    files = sorted(folder.glob("output-*"))
    output = "".join(file.read_text() for file in files) + said
    if late:
        pytest.fail(f"The job didn't end in time:\n{output}")
    return process.returncode, output


def results(output):
    return [json.loads(found) for found in re.findall(r"^RESULT (.*)$", output, re.M)]


@pytest.mark.parametrize("size", [2, *map(soak, (1, 3, 4, 5))])
def test_contract_of_communicators(mpirun, tmp_path, size):
    script = f"""
    import sys
    sys.path.insert(0, {str(SUPPORT)!r})
    from mpi4py import MPI
    from kerasdist.cluster import resolve
    from kerasdist.collectives import connect
    from process_group import run_contract

    side = MPI.COMM_WORLD.Dup()
    assert side.size == {size}
    run_contract(
        "mpi", side.size, lambda: connect(resolve(), transport="mpi"), side.allgather
    )
    """
    code, output = run(mpirun, tmp_path, script, size)
    assert code == 0, output


@pytest.mark.soak
def test_training_needs_no_other_settings(mpirun, tmp_path):
    code, output = run(mpirun, tmp_path, ALL_TRANSPORTS, 2, "auto", 1, "graph")
    assert code == 0, output
    first, second = results(output)
    env = {"TF_CONFIG": None}
    (alone,) = Workers(ALL_TRANSPORTS, 1, ["auto", "1", "graph"], env).results()

    assert first["communicator"] == second["communicator"] == "MpiCommunicator"
    assert first["equal"]
    assert second["equal"]
    assert sorted([first["task"], second["task"]]) == [0, 1]  # both were task 0
    assert sorted([first["local"], second["local"]]) == [[0, 2], [1, 2]]
    assert first["weights"] == second["weights"]
    for name in ("weights", "loss", "evaluated"):
        assert first[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6)


CATCH = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from kerasdist import errors
from kerasdist.cluster import resolve
from kerasdist.collectives import connect
from kerasdist.transport.deadline import Timeouts

def fail(error):
    text = f"RAISED {job.communicator.rank} {type(error).__name__} {error}\\n"
    sys.stdout.write(text)
    sys.stdout.flush()

job = connect(
    resolve(), transport="mpi", timeouts=Timeouts(collective=SECONDS, startup=60)
)
communicator = job.communicator
communicator.barrier()

def wait_for_all(ranks):
    # The first to end ends the others: not before they have spoken.
    folder = Path(__file__).parent
    (folder / f"spoken-{communicator.rank}").touch()
    end = time.monotonic() + 60
    while not all((folder / f"spoken-{rank}").exists() for rank in ranks):
        assert time.monotonic() < end
        time.sleep(0.01)
""".replace("SECONDS", str(bound(1.5)))


def raised(output, rank, pattern):
    return re.search(rf"RAISED {rank} {pattern}", output)


# Places that are refused, or not MPI's; before a job is connected.
PLACES = """
import json, os
from kerasdist import errors
from kerasdist.cluster import resolve
from kerasdist.collectives import connect

def refused(place, transport):
    try:
        connect(place, transport=transport)
    except errors.ClusterError as error:
        return str(error)

def worker(index, count):
    workers = [f"127.0.0.1:{1000 + i}" for i in range(count)]
    task = {"type": "worker", "index": index}
    return {"cluster": {"worker": workers}, "task": task}

found = [refused(resolve(), "tcp"), refused(resolve(worker(0, 1)), "mpi")]
os.environ["TF_CONFIG"] = json.dumps(worker(2, 4))
place = resolve()
found.append([place.source, place.rank, place.size])
print("RESULT", json.dumps(found), flush=True)
del os.environ["TF_CONFIG"]
"""


def test_other_places_are_refused_and_a_mismatch_names_both_sides(mpirun, tmp_path):
    script = (
        PLACES
        + CATCH
        + textwrap.dedent("""
    try:
        communicator.all_reduce([np.zeros(2 + (communicator.rank == 1))])
    except errors.CollectiveMismatch as error:
        fail(error)
    try:
        communicator.barrier()
    except errors.CollectiveMismatch:
        print("AGAIN", flush=True)
    wait_for_all(range(3))
    """)
    )
    _, output = run(mpirun, tmp_path, script, 3)
    for rank in range(3):
        assert raised(
            output,
            rank,
            rf"CollectiveMismatch Ranks called different collectives at step 0\. "
            rf"Received: rank {rank} \(\S+, pid \d+\): #\d+ all_reduce\(op='sum', "
            rf"dtype=float64, elements={3 if rank == 1 else 2}\); rank \d "
            rf"\(\S+, pid \d+\): #\d+ all_reduce",
        ), output
    assert output.count("AGAIN") == 3
    for transport, settings, place in results(output):
        assert transport.startswith(
            "Processes that were started by MPI don't know each other's addresses. "
            "Received: transport='tcp', OMPI_COMM_WORLD_RANK="
        )
        assert settings.startswith(
            "cluster argument and MPI disagree on this worker's rank. Received: rank 0 "
            "of 1 from cluster argument, rank "
        )
        assert place == ["TF_CONFIG", 2, 4]
    assert len(results(output)) == 3


def test_a_frozen_rank_is_named_and_the_job_ends(mpirun, tmp_path):
    script = CATCH + textwrap.dedent("""
    if communicator.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        communicator.barrier()
    except errors.CollectiveTimeout as error:
        fail(error)
    wait_for_all([0, 1])
    """)
    code, output = run(mpirun, tmp_path, script, 3)
    assert code != 0
    for rank in (0, 1):
        assert raised(
            output,
            rank,
            r"CollectiveTimeout rank 2 \(\S+, pid \d+\) didn't join #\d+ "
            rf"barrier\(\) in time; rank {rank} \(\S+, pid \d+\) waited at step 0\.",
        ), output


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", ""),
        ("raise KeyError('what went wrong')", "KeyError: 'what went wrong'"),
    ],
)
def test_a_rank_that_ends_badly_ends_the_job(mpirun, tmp_path, end, shown):
    script = f"{CATCH}\nif communicator.rank == 1:\n    {end}\ncommunicator.barrier()\n"
    code, output = run(mpirun, tmp_path, script, 3)
    assert code != 0, output
    assert shown in output


STARTED = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
WITHOUT = "import sys; sys.modules['mpi4py'] = None"


@pytest.mark.parametrize(
    ("before", "transport", "env", "said"),
    [
        (
            *("", "mpi", {}),
            "transport='mpi' needs a process that was started by `mpirun`. Received: ",
        ),
        (
            *(WITHOUT, "auto", STARTED),
            "This process was started by MPI, and only MPI can connect it with the "
            "others: that needs mpi4py. Received: ModuleNotFoundError.*"
            "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2. Install it",
        ),
        # Each process would be alone: MPI's world has one process then.
        (
            *("", "auto", STARTED),
            "`mpirun` started this process as rank 1 of 2, but the MPI that mpi4py "
            "uses doesn't know that. Received: rank 0 of 1 from ",
        ),
    ],
    ids=["no mpirun", "no mpi4py", "another mpirun"],
)
def test_what_is_missing_is_named(request, tmp_path, before, transport, env, said):
    if not before:
        request.getfixturevalue("mpirun")
    script = f"""
{before}
import json
import kerasdist.errors
from kerasdist.cluster import resolve
from kerasdist.collectives import connect
try:
    connect(resolve(), transport={transport!r})
except kerasdist.errors.ClusterError as error:
    print("RESULT", json.dumps(str(error)))
"""
    env = {"TF_CONFIG": None, **elsewhere(tmp_path), **env}
    message = Workers(script, 1, env=env).run()[0].result
    assert re.match(said, message, re.DOTALL), message
