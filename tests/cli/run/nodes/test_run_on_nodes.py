import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hosts import Hosts
from kerasdist import cli
from kerasdist.cli.run import command
from kerasdist.cli.run.nodes import RendezvousError, meeting
from kerasdist.cli.run.options import NodeOptions
from kerasdist.transport import log
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.rendezvous.dial import dial_address, retry
from launching import wait_until_said
from pace import bound
from workers import free_ports

SECRET = b"secret" * 8


@pytest.fixture(scope="module")
def hosts():
    if (why_not := Hosts.available()) is not None:
        pytest.skip(why_not)
    with Hosts(3) as made:
        yield made


@pytest.fixture
def launchers(hosts, launchers):
    for host, launcher in enumerate(launchers):
        launcher.prefix = hosts.prefix(host)
    return launchers


def nodes(hosts, count, rank=None):
    options = ["--nnodes", str(count), "--rendezvous", f"{hosts.address(0)}:29400"]
    return options if rank is None else [*options, "--node-rank", str(rank)]


def ends(jobs):
    return [
        (job.returncode, *output)
        for job, output in [(job, job.communicate(timeout=bound(90))) for job in jobs]
    ]


SHOW = """
names = ["LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"]
found = [config["cluster"], *map(os.environ.get, names)]
mark(f"{config['task']['type']}-{rank}", json.dumps(found))
print("I am", rank, flush=True)
"""


def test_tasks_of_all_hosts_are_one_job(hosts, launchers):
    """The first host starts last; hosts may have different numbers of tasks.

    Each divides its own GPUs, and workers have a rank among those of the host.
    """
    jobs = []
    # Its number may be found out, and the secret be in a file.
    secret = launchers[1].env.pop("KERASDIST_SECRET")
    (launchers[1].folder / "secret").write_text(f"{secret}\n")
    other = ("--nproc-per-node", 2, "--secret-file", "secret", *nodes(hosts, 2))
    own = ("-n", 1, "--ps", 1, *nodes(hosts, 2, 0))
    for host, options in ((1, (*other, "python")), (0, own)):
        launchers[host].env["CUDA_VISIBLE_DEVICES"] = "0,1"
        jobs.append(launchers[host].start(*options, "script.py", script=SHOW))
    (second, out2, err2), (first, out1, err1) = ends(jobs)
    assert (first, second) == (0, 0), err1 + err2
    assert out1 == "I am 0\n"
    assert out2 == ""
    found = {
        name: json.loads((launchers[host].folder / name).read_text())
        for host, names in ((0, ["worker-0", "ps-0"]), (1, ["worker-1", "worker-2"]))
        for name in names
    }
    cluster = found["worker-0"][0]
    assert found == {
        "worker-0": [cluster, "0", "3", "1", "0,1"],
        "worker-1": [cluster, "0", "3", "2", "0"],
        "worker-2": [cluster, "1", "3", "2", "1"],
        "ps-0": [cluster, None, None, None, "-1"],
    }
    addresses = [hosts.address(host) for host in (0, 1, 1)]
    assert [each.partition(":")[0] for each in cluster["worker"]] == addresses
    assert [each.partition(":")[0] for each in cluster["ps"]] == addresses[:1]


SOON = (
    "from kerasdist.transport.rendezvous import waiting_notice as w; "
    "w.FIRST_SECONDS = w.AGAIN_SECONDS = 0.5"
)
# Host 0 looks only when a host arrives: then the one that it replaces has just left.
SELDOM = f"{SOON}; from kerasdist.cli.run import nodes; nodes.AGAIN_SECONDS = 60.0"


def test_launchers_say_for_whom_they_wait(hosts, launchers):
    """Before all are here, one is killed and started again: it takes its place."""

    def start(host, before=SOON):
        options = (*("-n", 1, *nodes(hosts, 3, host)), "script.py")
        return launchers[host].start(*options, script=SHOW, before=before)

    killed = start(1)
    line = wait_until_said(killed, "Missing: host 0: ")
    assert line.startswith("kerasdist run: host 1 has been waiting for host 0 (")
    assert "connection refused: nothing listens there." in line
    jobs = [start(0, SELDOM)]
    line = wait_until_said(jobs[0], f"Here: host 0, host 1 ({hosts.address(1)}).")
    assert line.startswith("kerasdist run: host 0 has been waiting for 1 of 3 hosts")
    wait_until_said(killed, "host 0 waits for them")
    killed.kill()
    killed.communicate(timeout=bound(30))
    jobs.append(start(1))
    wait_until_said(jobs[1], "host 0 waits for them")
    jobs.append(start(2))
    assert [code for code, _, _ in ends(jobs)] == [0, 0, 0]


def options_at(rendezvous, count, seconds=60):
    return NodeOptions(count=count, rank=0, rendezvous=rendezvous, seconds=seconds)


def test_an_error_of_the_block_is_unchanged():
    options = options_at(f"127.0.0.1:{free_ports(1)[0]}", 1)
    with pytest.raises(PermissionError), meeting(options, 1, 0, SECRET):
        raise PermissionError("a folder")


def test_a_second_launcher_on_a_machine_is_told_what_it_lacks():
    with socket.create_server(("127.0.0.1", 0)) as other:
        options = options_at(f"127.0.0.1:{other.getsockname()[1]}", 2, seconds=1)
        with (
            pytest.raises(RendezvousError, match="give each its --node-rank"),
            meeting(options, 1, 0, SECRET),
        ):
            pass


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "1 of 2 hosts are here, after 1 s (--start-timeout)"),
        ("192.0.2.1", "rendezvous at 192"),  # isn't an own address
    ],
)
def test_a_job_that_does_not_start(tmp_path, monkeypatch, said, host, words):
    (tmp_path / "script.py").touch()
    monkeypatch.setenv("KERASDIST_SECRET", SECRET.decode())
    monkeypatch.delattr(command, "run_supervised")
    place = ("--rendezvous", f"{host}:{free_ports(1)[0]}", "--start-timeout", "1")
    options = ("-n", "1", "--nnodes", "2", "--node-rank", "0", *place)
    assert cli.main(["run", *options, str(tmp_path / "script.py")]) == 1
    log.flush(None)
    assert words in said()[-1]


def test_a_host_says_what_is_missing_at_the_end():
    address = f"127.0.0.1:{free_ports(1)[0]}"

    def end_of(rank, seconds):
        options = NodeOptions(count=3, rank=rank, rendezvous=address, seconds=seconds)
        with pytest.raises(RendezvousError) as caught, meeting(options, 1, 0, SECRET):
            pass
        return str(caught.value)

    assert end_of(1, 1).startswith(f"host 0 isn't at {address} yet (")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(end_of, 0, bound(4))
        assert end_of(1, bound(2)).startswith("other hosts aren't here, after ")


def test_who_does_not_fit_is_refused_with_the_reason():
    """Also one that holds the secret: its addresses go into all tasks' TF_CONFIG."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    deadline = Deadline(bound(60))

    def meet():
        with meeting(options_at(address, 2), 1, 0, SECRET) as part:
            return part

    def ask(**changed):
        tasks = {"worker": ["h:1"], "ps": []}
        hello = {"session": "kerasdist run", "purpose": "node", "rank": 1}
        hello |= {"count": 2, "tasks": tasks, **changed}
        connection = retry(
            lambda: dial_address(address, SECRET, hello, deadline),
            *(deadline, 1, address, threading.Event()),
        )
        with connection:
            return dict(connection.read_json(deadline)[1])

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet)
        for given in (5, None, "h", "h:\x1b[31m1", ["h:1"], "h:99999"):
            fault = ask(tasks={"worker": [given], "ps": []})["message"]
            what = {str: "an address of a task "}.get(type(given), "A hello is damaged")
            assert fault.startswith(what)
            assert "\x1b" not in fault
        for changed, fault in (
            (
                {"tasks": {"worker": ["h:1", "h:1"], "ps": []}},
                "it names an address that",
            ),
            ({"tasks": {"worker": ["h:1"]}}, "it names no tasks"),
            ({"count": 3}, "it was started with --nnodes 3, and the host of the rende"),
            ({"rank": 0}, "there is a host with --node-rank 0 already"),
            ({"facts": {}}, "one of `kerasdist run` and `kerasdist doctor` was"),
        ):
            assert ask(**changed)["message"].startswith(fault)
        found = ask(rank=-1)
        assert found["first"] == {"worker": 1, "ps": 0}
        cluster = found["cluster"]
        assert cluster["worker"][1:] == ["h:1"]
        mine = first.result(bound(60)).cluster
        assert {kind: list(addresses) for kind, addresses in mine.items()} == cluster
