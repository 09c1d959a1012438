"""The command `kerasdist doctor`: reports faults of the environment, and remedies.

It only inspects: it starts no job and changes nothing. A check yields findings and
prints nothing. A fault of the machine or the settings is a finding with a remedy, never
an exception. Sections are printed as soon as they are known.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import functools
import importlib.util
import itertools
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from kerasdist._version import TESTED_VERSIONS, __version__
from kerasdist.cli import env
from kerasdist.cli.console import Command, above_zero, json_option, options_of
from kerasdist.cli.run import options as run_options
from kerasdist.cli.run.hosts import places
from kerasdist.cli.run.hosts.probe import PACKAGES, facts, version_of
from kerasdist.cli.run.nodes import LocalPart, RendezvousError, meeting
from kerasdist.cluster import Cluster, resolve
from kerasdist.cluster.address import split_address
from kerasdist.errors import ClusterError, SharedMemoryFull
from kerasdist.placement.plan import counted
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.handshake import is_loopback, secret_fault
from kerasdist.transport.memory import create_segment
from kerasdist.transport.rendezvous.bind import listen_at
from kerasdist.transport.rendezvous.waiting_notice import why_unreachable
from kerasdist.transport.tls import tls_fault

_MiB = 1024**2
_RETRY_SECONDS = 0.25
_DEVICES_SECONDS = 120.0  # importing TensorFlow from a cold network disk
# The doctor of another machine tries to reach this one four times a second.
_LISTEN_AT_LEAST = 1.0
_START_SECONDS = 60  # of other hosts, with --nnodes
# Seconds for the way of a question and its answer, and for a launcher that is late.
_MORE_SECONDS = 10
_MARKS = {"ok": "  ok   ", "warn": "  WARN ", "fault": "  FAULT"}
_IF_NOT_LISTENING = {
    errno.EACCES: "choose a port above 1023",
    errno.EADDRNOTAVAIL: "use an address of this machine",
}
_NOT_NEEDED = "and isn't needed: no address can be reached from other machines"
_NOT_LOOKED_AT = """
Not looked at: the script, and what other hosts have of cores, memory, {more}
(run `kerasdist doctor` there); cluster settings of the environment, which
`kerasdist run` replaces"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: `"ok"`, `"warn"` (works, but may surprise) or `"fault"` (a job can't
            run like this).
        text: What was found.
        remedy: The action to take; empty if none is needed.
    """

    level: Literal["ok", "warn", "fault"]
    text: str
    remedy: str = ""


_Findings = Iterator[Finding]
_Sections = Iterator[tuple[str, Iterable[Finding]]]
_ok = functools.partial(Finding, "ok")
_warn = functools.partial(Finding, "warn")
_fault = functools.partial(Finding, "fault")
_OPTIONS = (
    *options_of(
        """
--timeout S
    seconds to try to reach the peers, and for a host those of other hosts (default: 5)
""",
        timeout={"type": above_zero(float, "a number of seconds"), "default": 5.0},
    ),
    json_option("text"),
    *run_options.HOSTS,
    *run_options.node_options(_START_SECONDS),
)


def _run(arguments: argparse.Namespace) -> int:
    faults: list[str] = []
    hosts = run_options.read_hosts(arguments, faults)
    nodes = run_options.read_nodes(arguments, faults, _START_SECONDS)
    if faults:
        arguments.parser.error("\n  ".join(faults))
    if hosts is not None:
        job = check_hosts(hosts, arguments.timeout)
    elif nodes is not None:
        nodes = dataclasses.replace(nodes, only_looks=True)
        job = check_nodes(nodes, arguments.timeout, os.environ)
    else:
        job = check_task(arguments.timeout, os.environ)
    counts = dict.fromkeys(_MARKS, 0)
    sections = []
    for title, section in _with_machine(job, os.environ):
        found = list(section)
        for finding in found:
            counts[finding.level] += 1
        if not arguments.json:
            _print(title, found)
        findings = [dataclasses.asdict(finding) for finding in found]
        sections.append({"name": title, "findings": findings})
    arguments.document.update(counts=counts, sections=sections)
    faulty, warnings = counts["fault"], counts["warn"]
    if faulty and not arguments.json:
        print(f"{counted(faulty, 'fault')}: see the lines that begin with ->")
    elif not arguments.json:
        print("no faults" + (f", {counted(warnings, 'warning')}" if warnings else ""))
    return 1 if faulty else 0


def _print(title: str, found: Sequence[Finding]) -> None:
    print(f"{title}:")
    for finding in found:
        print(_MARKS[finding.level], "\n          ".join(finding.text.splitlines()))
        if finding.remedy:
            print(f"          -> {finding.remedy}")
    sys.stdout.flush()


# This machine: software, devices, memory, cores.


def _with_machine(job: _Sections, environ: Mapping[str, str]) -> _Sections:
    """Yield the sections of this machine, and those of the job among them."""
    yield "versions", check_versions(environ)
    yield "cores", check_cores()
    yield "allocator", check_allocator(environ)
    yield "shared memory", check_shared_memory()
    yield from job
    yield "devices", check_devices(_DEVICES_SECONDS)


def check_versions(environ: Mapping[str, str]) -> _Findings:
    """Check the versions, without importing TensorFlow."""
    yield _ok(f"kerasdist {__version__}")
    yield _ok(f"Python {platform.python_version()}")
    install = f"{sys.executable} -m pip install"
    for name, distributions in PACKAGES.items():
        version = version_of(*distributions)
        wanted, _ = TESTED_VERSIONS.get(name, ("0", ""))
        if version is None:
            yield _fault(f"{name} isn't installed", f"{install} {name}")
        elif _numbers(version) < _numbers(wanted):
            text = f"{name} {version} is too old, at least {wanted} is needed"
            yield _fault(text, f"{install} '{name}>={wanted}'")
        else:
            yield _ok(f"{name} {version}")
    backend = environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        text = f"Keras uses another backend: KERAS_BACKEND={backend!r}"
        yield _fault(text, "unset KERAS_BACKEND, or set it to tensorflow")
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        text = "tf.keras is Keras 2: TF_USE_LEGACY_KERAS is set"
        yield _fault(text, "unset TF_USE_LEGACY_KERAS")


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


def check_devices(
    seconds: float,
    command: Sequence[str] = env.LISTING,
    drivers: str = "/proc/driver/nvidia",
) -> _Findings:
    """List TensorFlow's devices, in a process of its own.

    Args:
        seconds: How long it may take.
        command: The command that prints the devices.
        drivers: The driver's folder.
    """
    found = env.gpus(seconds, command, drivers)
    asked = found["TensorFlow"]
    if "unreadable" in asked:
        remedy = f"look at the output of `{sys.executable} -c 'import tensorflow'`"
        yield _fault(asked["unreadable"], remedy)
        return
    yield from (_ok(f"device {name}") for name in asked["devices"])
    gpus = sum(name.startswith("GPU:") for name in asked["devices"])
    known = len(found.get("GPUs of the driver", ()))
    if known > gpus:
        yield _warn(
            f"the driver knows {known} GPUs, TensorFlow sees {gpus}",
            "look at CUDA_VISIBLE_DEVICES, and whether TensorFlow has its CUDA "
            "libraries (pip install 'tensorflow[and-cuda]')",
        )


def check_shared_memory() -> _Findings:
    """Try to allocate memory that workers of this machine can share."""
    try:
        os.close(create_segment(_MiB))
        yield _ok("workers of this machine can share memory")
    except (SharedMemoryFull, OSError) as error:
        yield _fault(
            f"memory can't be shared: {error}",
            "give the container or the process more memory, or use transport='tcp'",
        )


def check_cores(root: str = "/sys/fs/cgroup") -> _Findings:
    """Count the cores that this process may use.

    Args:
        root: Where control groups are, which limit a container.
    """
    usable = len(os.sched_getaffinity(0))
    text = f"{usable} of {os.cpu_count() or 1} cores can be used"
    quota = math.inf
    with contextlib.suppress(OSError):
        quota = env.control_group(root).get("cores", math.inf)
    if quota >= usable:
        yield _ok(text)
    else:
        yield _warn(
            f"{text}, but this container gets the time of {quota:g}",
            "TensorFlow starts a thread for each core: set TF_NUM_INTRAOP_THREADS="
            f"{max(1, int(quota))}, or raise the limit",
        )


def check_allocator(environ: Mapping[str, str]) -> _Findings:
    """Find the allocator that is in use."""
    if (loaded := env.loaded_allocator(environ)) is not None:
        yield _ok(f"memory is allocated with {loaded} (LD_PRELOAD)")
    elif (library := env.find_allocator()) is not None:
        yield _ok(f"{library} is installed: `kerasdist run --malloc auto` uses it")
    else:
        yield _ok("memory is allocated with the C library")


# This task's place in its job: its settings, its secret and certificates, its own
# address (can it listen there?) and its peers (can they be reached?).


def check_task(seconds: float, environ: Mapping[str, str]) -> _Sections:
    """Yield the sections of the cluster that the environment has."""
    cluster = None
    try:
        cluster = resolve(environ=environ)
    except ClusterError as error:
        remedy = "correct the settings; on the other workers, too"
        yield "cluster", [_fault(str(error), remedy)]
    else:
        yield "cluster", check_cluster(cluster)
    if cluster is not None and _addresses(cluster):
        yield "secret", check_secret(cluster, environ)
        yield "encryption", check_encryption(cluster, environ)
        began = time.monotonic()
        with own_port(cluster, environ) as found:
            yield "own port", found
            peers = check_peers(cluster, seconds)
            yield "peers", peers
            if peers:
                time.sleep(max(0.0, began + _LISTEN_AT_LEAST - time.monotonic()))
    elif environ.get("KERASDIST_TLS", "").strip():
        # `kerasdist run` will use it.
        yield "encryption", check_encryption(None, environ)


def check_cluster(cluster: Cluster) -> _Findings:
    """Tell this task's place and all addresses; without starting MPI."""
    if cluster.source == "none":
        yield _ok(
            "no cluster settings: one worker\nNo other host was looked at: for a job "
            "of `kerasdist run -H` or `--nnodes`, give the doctor these options, too"
        )
        return
    who = f" ({cluster.task_type} {cluster.task_index}), by {cluster.source}"
    if cluster.needs_mpi:
        who = ", by MPI"
    if cluster.needs_mpi and cluster.size == 1:
        yield _ok("a process that PMIx started: only MPI knows its rank")
    elif cluster.rank is not None:
        yield _ok(f"this is rank {cluster.rank} of {cluster.size}{who}")
    else:
        server = f"server {cluster.task_index} of {len(cluster.servers)}"
        yield _ok(f"this is {server}, by {cluster.source}")
    if cluster.needs_mpi and importlib.util.find_spec("mpi4py") is None:
        yield _fault(
            "mpi4py isn't installed, which connects MPI's processes",
            f"{sys.executable} -m pip install 'kerasdist[mpi]'",
        )
    for address, name in _names(cluster).items():
        yield _ok(f"{name}: {address}")
    if len({is_loopback(address) for address in _addresses(cluster)}) > 1:
        yield _warn(
            "some addresses are loopback, others are not: from another machine, "
            "localhost is that machine itself",
            "use the name by which the other machines know this one",
        )


def _addresses(cluster: Cluster) -> tuple[str, ...]:
    return (*cluster.workers, *cluster.servers)


def _names(cluster: Cluster) -> dict[str, str]:
    """Return how tasks are called, by their addresses."""
    return {
        address: f"{kind} {number}"
        for kind, listed in (("rank", cluster.workers), ("server", cluster.servers))
        for number, address in enumerate(listed)
    }


def check_secret(cluster: Cluster, environ: Mapping[str, str]) -> _Findings:
    """Check that there is a secret, or none is needed. It is never shown."""
    fault = secret_fault(environ)
    if fault is not None:
        text, _, remedy = fault.partition(" Set it to ")
        yield _fault(text, f"set it to {remedy}")
    elif environ.get("KERASDIST_SECRET"):
        yield _ok("KERASDIST_SECRET is set")
    elif all(map(is_loopback, _addresses(cluster))):
        yield _ok(f"KERASDIST_SECRET isn't set, {_NOT_NEEDED}")
    elif environ.get("KERASDIST_INSECURE") == "1":
        yield _warn(
            "KERASDIST_INSECURE=1: any process that reaches the ports can join the job",
            "set KERASDIST_SECRET instead, unless only this job can reach the network",
        )
    else:
        yield _fault(
            "KERASDIST_SECRET isn't set, and the addresses can be reached from other "
            "machines",
            "set it to the same random text on all workers (`openssl rand -hex 32`), "
            "or set KERASDIST_INSECURE=1 on a network that only this job can reach",
        )


def check_encryption(cluster: Cluster | None, environ: Mapping[str, str]) -> _Findings:
    """Check whether the job's connections are encrypted, and the certificates fit.

    Args:
        cluster: The cluster; None if the settings have none.
        environ: The environment.
    """
    fault = tls_fault(environ)
    if fault is not None:
        text, _, remedy = fault.partition(" Expected ")
        yield _fault(text, f"expected {remedy}")
    elif environ.get("KERASDIST_TLS", "").strip():
        why = "and the certificate is valid: TCP connections are encrypted"
        yield _ok(f"KERASDIST_TLS is set, {why}")
    elif cluster is None or all(map(is_loopback, _addresses(cluster))):
        yield _ok(f"KERASDIST_TLS isn't set, {_NOT_NEEDED}")
    else:
        why = "so nothing is encrypted between the machines"
        yield _ok(f"KERASDIST_TLS isn't set, {why}")


@contextlib.contextmanager
def own_port(cluster: Cluster, environ: Mapping[str, str]) -> Iterator[list[Finding]]:
    """Listen at this task's own address, inside the block.

    While the doctor listens, the doctors on the other machines can reach it.
    """
    address = cluster.address
    if address is None or environ.get("KERASDIST_LISTEN_FD"):
        yield [_ok(f"the launcher listens at {address} for us")] if address else []
        return
    host, port = split_address(address)
    finding = _ok(f"this task can listen at {address}")
    servers: list[socket.socket] = []
    try:
        servers, elsewhere = listen_at(address)
        if elsewhere:
            finding = _warn(
                f"port {port} is free, but {host!r} isn't an address of this machine",
                "that is right if it leads here (a Kubernetes service). If not, this "
                "process has another worker's task index",
            )
    except OSError as error:
        finding = _fault(
            f"this task can't listen at {address}: {os.strerror(error.errno or 0)}",
            _IF_NOT_LISTENING.get(error.errno or 0)
            or f"end the process that does (`ss -ltnp 'sport = :{port}'` shows it; it "
            "may be the job itself), or choose another port",
        )
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        yield [finding]


def check_peers(
    cluster: Cluster,
    seconds: float,
    probe: Callable[[str, float], str | None] = why_unreachable,
    names: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Try to reach all peers, at the same time.

    A peer that can't be reached yet is tried again until the time is over, so that the
    doctors of all machines don't have to start in the same moment.

    Args:
        cluster: The peers.
        seconds: How long to try.
        probe: Returns why an address can't be reached within some seconds; None if
            it can.
        names: The peers' names, by address; by default those of their tasks.
    """
    peers = dict(names or _names(cluster))
    peers.pop(cluster.address or "", None)
    deadline = Deadline(seconds)

    def look(address: str) -> str | None:
        while True:
            reason = probe(address, max(deadline.remaining(), 0.01))
            if reason is None or deadline.remaining() <= _RETRY_SECONDS:
                return reason
            time.sleep(_RETRY_SECONDS)

    with ThreadPoolExecutor(len(peers) or 1) as pool:
        reasons = list(pool.map(look, peers))
    return [
        _ok(f"{name} ({address}) accepts connections")
        if reason is None
        else _fault(f"{name} ({address}) can't be reached: {reason}", _remedy(reason))
        for (address, name), reason in zip(peers.items(), reasons, strict=True)
    ]


def _remedy(reason: str) -> str:
    """Return the remedy for a reason of `why_unreachable`."""
    if "resolve" in reason or "looking up" in reason:
        return "correct the name in the cluster settings, or the name server"
    if "refused" in reason:
        return (
            "start the worker there; before the job, run `kerasdist doctor` on all "
            "machines at the same time (see --timeout): it listens meanwhile"
        )
    return "look at whether that machine is up, and at the firewalls for that port"


# The hosts of `kerasdist run -H`: the launcher's code asks them, and no task is
# started.


def check_hosts(options: run_options.HostOptions, seconds: float) -> _Sections:
    """Ask the hosts of `-H` what the launcher asks; let them reach each other.

    Args:
        options: The settings.
        seconds: How long a host tries to reach another one.
    """
    names = ", ".join(host.target for host in options.hosts)
    text = f"a job on hosts that ssh reaches: {names}"
    text += _NOT_LOOKED_AT.format(more="certificates and devices but GPUs")
    yield "cluster", [_ok(text)]
    counts = dict.fromkeys(options.hosts, 1)
    with places.asking(options, counts, (), finds_gpus=True, listens=True) as (_, some):
        here = facts(os.getcwd(), [])
        answers = {probe: probe.result() for probe in some}
        found = (_of_host(probe.host, each, here) for probe, each in answers.items())
        yield "hosts", itertools.chain.from_iterable(found)
        if len(answers) > 1:
            yield "ports", _reach_each_other(answers, seconds)


def _of_host(
    host: run_options.Host, answer: dict[str, Any] | str, here: Mapping[str, Any]
) -> _Findings:
    faults = places.faults_of(host, answer, here)
    for text in faults:
        yield _fault(text, _host_remedy(host, answer, text))
    if isinstance(answer, str):
        return
    gpus, why_not = answer["gpus"]
    if why_not:
        remedy = "correct that, or start the job with --gpus none"
        yield _warn(f"{host.target} can't list its GPUs: {why_not}", remedy)
    elif not faults:
        text = f"{host.target} has the folder and versions of this host; GPUs: "
        yield _ok(f"{text}{len(gpus)}")


def _host_remedy(
    host: run_options.Host, answer: dict[str, Any] | str, text: str
) -> str:
    if isinstance(answer, str):
        return (
            f"make `ssh {host.target} true` work without a question; --ssh and "
            "--python have the commands that are used"
        )
    if "differs in its working folder" in text:
        return "make the folder there, for instance on a network disk"
    if "differs" in text:
        return "install the same version there, or name another Python with --python"
    return "name the host by one of its own addresses in the network of the others"


def _reach_each_other(
    answers: Mapping[places.HostProbe, dict[str, Any] | str], seconds: float
) -> _Findings:
    """Let each host connect to a port of each other one, as their tasks will."""
    addresses: dict[places.HostProbe, str] = {}
    for probe, answer in answers.items():
        if isinstance(answer, str) or not answer["addresses"]:
            text = f"no port of {probe.host.target} was tried, which can't be used"
            yield _warn(text, "correct that first")
        else:
            family, bound = answer["addresses"][0]
            place = places.Place(host=probe.host, family=family, address=tuple(bound))
            addresses[probe] = place.text
    others: dict[places.HostProbe, list[str]] = {}
    limit = seconds + places.ANSWER_SECONDS
    for probe in addresses:
        others[probe] = [a for other, a in addresses.items() if other is not probe]
        probe.ask({"addresses": others[probe], "seconds": seconds}, limit)
    for probe, listed in others.items():
        name, reply = probe.host.target, probe.result()
        if isinstance(reply, str):
            text = f"{name} can't try to reach the others: {reply}"
            yield _warn(text, "correct what is said of that host above")
            continue
        for address, why in zip(listed, reply["unreachable"], strict=True):
            if why is not None:
                yield _fault(
                    f"{name} can't reach {address}: {why}",
                    "look at the firewalls between the two, which must let all ports "
                    "pass, and at whether the name means the same host on both",
                )
        if listed and not any(reply["unreachable"]):
            yield _ok(f"{name} reaches {', '.join(listed)}")


# The hosts of `kerasdist run --nnodes`: doctors meet as launchers do.


def check_nodes(
    options: run_options.NodeOptions, seconds: float, environ: Mapping[str, str]
) -> _Sections:
    """Meet the doctors of the other hosts as launchers of `--nnodes` meet.

    Args:
        options: The settings.
        seconds: How long to try to reach the port of another host.
        environ: The environment.
    """
    text = f"a job of {options.count} hosts, which meet at {options.rendezvous}"
    text += _NOT_LOOKED_AT.format(more="certificates and devices")
    yield "cluster", [_ok(text)]
    place = Cluster(rank=0, size=1, workers=(options.rendezvous,))
    found = list(check_secret(place, environ)) if options.count > 1 else []
    if found:
        yield "secret", found
    found += (encryption := list(check_encryption(place, environ)))
    yield "encryption", encryption
    if any(each.level == "fault" for each in found):
        text = "the other hosts weren't met: the secret or the certificates are wrong"
        yield "hosts", [_warn(text, "correct that first")]
        return
    secret = environ.get("KERASDIST_SECRET", "").encode()
    remedy = (
        f"start this command at the same time on all {options.count} hosts, with the "
        f"same secret; they must reach {options.rendezvous}"
    )
    try:
        with meeting(options, 1, 0, secret) as part:
            index, workers = part.first["worker"], tuple(part.cluster["worker"])
            count, late = len(workers), math.ceil(seconds) + _MORE_SECONDS
            numbers = dict(zip(workers, sorted(part.facts), strict=True))
            yield "hosts", _of_nodes(options, part, numbers, remedy)
            cluster = Cluster(rank=index, size=count, workers=workers)
            names = {each: f"host {i}" for each, i in numbers.items()}
            yield "peers", check_peers(cluster, seconds, names=names)
            # Others may still try to reach this one: all leave together.
            again = dataclasses.replace(options, count=count, rank=index, seconds=late)
            with contextlib.suppress(RendezvousError), meeting(again, 1, 0, secret):
                pass
    except RendezvousError as error:
        yield "hosts", [_fault(str(error), remedy)]


def _of_nodes(
    options: run_options.NodeOptions,
    part: LocalPart,
    numbers: Mapping[str, int],
    remedy: str,
) -> _Findings:
    """Tell which hosts came, and in what they differ from this one."""
    own = numbers[part.cluster["worker"][part.first["worker"]]]
    for address, number in numbers.items():
        name = f"host {number} ({split_address(address)[0]})"
        faults = places.differences(name, part.facts[number], part.facts[own])
        for each in faults:
            yield _fault(each, "install the same on all hosts")
        if not faults:
            same = "is this one" if number == own else "is here, with the same versions"
            yield _ok(f"{name} {same}")
    missing = sorted({*range(options.count)} - {*part.facts})
    refused = [f"refused: {each}" for each in part.refused]
    if missing:
        text = f"{len(missing)} of {options.count} hosts didn't come in time"
        if options.rank is not None:
            text += f": host {', '.join(map(str, missing))}"
        text += f" (--start-timeout {options.seconds})"
        yield _fault("\n".join([text, *refused]), remedy)
    elif refused:
        text = "\n".join(["others were refused before all were here", *refused])
        remedy = "nothing, if these were earlier attempts; else end those processes"
        yield _warn(text, remedy)


COMMAND = Command(
    name="doctor",
    handler=_run,
    options=_OPTIONS,
    help="look for faults that would keep a job from running",
    description="Check versions, devices, cluster settings, peers and memory, and "
    "print a remedy for each fault. Run it with the environment of the job, on all "
    "machines at the same time: while it runs, it listens at this task's address. With "
    "-H or --nnodes, and the options that `kerasdist run` has with them, check the "
    "hosts of such a job instead: those of -H from this one, those of --nnodes by "
    "starting this command on all of them. Exit code 0 if nothing is wrong, else 1.",
)
