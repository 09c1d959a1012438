"""The options of `kerasdist run`, and what they say about hosts and elastic jobs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import ipaddress
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence

from kerasdist.cli.console import Option, must_be, options_of
from kerasdist.cli.env import ALLOCATORS
from kerasdist.cluster.address import address_fault
from kerasdist.cluster.tf_config import grace_seconds
from kerasdist.errors import ClusterError

# Seconds that launchers wait for those of other hosts.
_SECONDS = 600

_JOB = options_of(
    f"""
-n -np --nproc-per-node --nproc_per_node N
    number of workers on this machine, or on all hosts of -H (default there: as many as
    they have room for)
--ps M
    number of parameter servers, which run the same script (default: 0)
--log-dir D
    folder for the output of ranks 1 to N-1, rank-1.log and so on, and of servers,
    ps-0.log and so on (default: a temporary one, which is removed if the job succeeds)
--output
    'chief': the output of rank 0 passes through, that of the others is written to the
    logs. 'all': that of the others is shown as well, each line with its rank in front,
    or 'ps' and the server's index (default: chief)
--bind
    'cores': each worker gets its share of the cores, and TensorFlow as many threads
    (default: none)
--malloc none|auto|LIB
    an allocator for the workers, loaded before the C library's: 'auto' takes the first
    installed one of {", ".join(ALLOCATORS)}; or the path of a shared library (default:
    none)
--tensorflow-log
    show what TensorFlow writes when it is imported (default: only if
    TF_CPP_MIN_LOG_LEVEL is 0)
--gpus auto|N|all|none
    the GPUs of each worker: 'auto': its share of those of its host; N: this many of
    them; 'all': each worker sees all of them; 'none': none. Servers have none, unless
    'all' is given (default: auto)
""",
    n={"dest": "size"},
    ps={"dest": "servers", "default": "0"},
    output={"choices": ("chief", "all"), "default": "chief"},
    bind={"choices": ("none", "cores"), "default": "none"},
    malloc={"default": "none"},
    gpus={"default": "auto"},
)
_ELASTIC = options_of("""
--elastic
    a worker that is lost doesn't end the job: the others go on, and the exit code is 0
    if one of them finishes
--min-workers M
    with --elastic: the smallest number of workers that go on (default: 1)
--max-workers M
    with --elastic: the number of workers to which the job may grow; SIGUSR1 to the
    launcher adds one (default: N)
--restarts R
    with --elastic: how many times lost workers are started again, all of them together;
    the first time after 1 s, then 2 s, 4 s and so on (default: 0). A worker that was
    sent SIGTERM isn't started again
""")
HOSTS = options_of(
    """
-H --hosts HOST[:SLOTS],...
    hosts that ssh reaches without a password, each with its number of workers (default
    of SLOTS: 1)
--hostfile FILE
    a file with a host in each line, as `host slots=2`
--ssh COMMAND
    with hosts: the command that connects, with its options (default: ssh)
--python PATH
    with hosts: the path of Python there (default: that of this one)
-x NAME[=VALUE]
    with hosts: a variable for the workers. Those of kerasdist, TensorFlow, Keras and
    Python (KERASDIST_*, TF_*, KERAS_*, PYTHON* and the like) are passed on without it
""",
    x={"dest": "exported", "action": "append", "default": []},
)


def node_options(seconds: int) -> tuple[Option, ...]:
    """Return the options for jobs whose hosts have a launcher each.

    Args:
        seconds: How long the command waits for other hosts by default.
    """
    return options_of(f"""
--nnodes K
    number of hosts, on each of which this command is started, with the same
    --rendezvous and secret, in any order
--node-rank --node_rank I
    with --nnodes: the number of this host, from 0 on, which orders the workers
    (default: the host of --rendezvous is 0, the others as they arrive)
--rendezvous --rdzv-endpoint --rdzv_endpoint HOST:PORT
    with --nnodes: a free port of host 0, which all hosts reach
--secret-file FILE
    a file with the job's secret, the same on all hosts, in the place of the variable
    KERASDIST_SECRET
--start-timeout S
    with --nnodes: seconds to wait for other hosts (default: {seconds})
""")


ALL_OPTIONS = (*_JOB, *_ELASTIC, *HOSTS, *node_options(_SECONDS))


def read_number(option: str, text: str, least: int, faults: list[str]) -> int:
    """Return an option's number; `least` if it's wrong."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        faults.append(must_be(option, f"an integer >= {least}", text))
    return max(number, least)


def _refuse_without(
    switch: str, what: str, given: Mapping[str, str | None], faults: list[str]
) -> None:
    """Report options that mean nothing without another one."""
    faults += [
        f"{name} is an option {what}. Received: {name} {text} without {switch}"
        for name, text in given.items()
        if text is not None
    ]


def check_gpus(text: str, faults: list[str]) -> None:
    """Check the value of `--gpus`."""
    if text not in ("auto", "all", "none") and not (
        text.isdecimal() and text.isascii()
    ):
        what = "'auto', 'all', 'none' or a number >= 0"
        faults.append(must_be("--gpus", what, text))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """The settings of an elastic job.

    Attributes:
        min_workers: The smallest number of workers that go on.
        restarts: How many times workers are started again, all of them together.
        grace: Seconds from SIGTERM to SIGKILL.
        size: The number of workers with which the job starts.
        max_workers: The number of workers to which it may grow.
    """

    min_workers: int
    restarts: int
    grace: float
    size: int
    max_workers: int

    @property
    def grows(self) -> bool:
        """Whether workers may be added to the job."""
        return self.max_workers > self.size

    @property
    def environ(self) -> dict[str, str]:
        """The variables by which the strategy of a task knows the settings."""
        environ = {
            "KERASDIST_ELASTIC": "1",
            "KERASDIST_MIN_WORKERS": str(self.min_workers),
        }
        if self.grows:
            environ["KERASDIST_START_WORKERS"] = str(self.size)
        return environ


def read_elastic(
    arguments: argparse.Namespace, size: int, faults: list[str]
) -> ElasticOptions | None:
    """Return the settings; None without `--elastic`.

    Args:
        arguments: The parsed arguments.
        size: Number of workers.
        faults: Takes a message about each value that can't be used.
    """
    given = {
        "--min-workers": arguments.min_workers,
        "--max-workers": arguments.max_workers,
        "--restarts": arguments.restarts,
    }
    if not arguments.elastic:
        switch = "--elastic. Expected both or neither"
        _refuse_without(switch, "of elastic jobs", given, faults)
        return None
    least = read_number("--min-workers", given["--min-workers"] or "1", 1, faults)
    if least > size:
        what = "at most the number of workers"
        faults.append(must_be("--min-workers", what, least, f" and -n {size}"))
    most = read_number("--max-workers", given["--max-workers"] or str(size), 1, faults)
    if most < size:
        what = "at least the number of workers"
        faults.append(must_be("--max-workers", what, most, f" and -n {size}"))
    restarts = read_number("--restarts", given["--restarts"] or "0", 0, faults)
    grace = 0.0
    try:
        grace = grace_seconds(os.environ)
    except ClusterError as error:
        faults.append(str(error))
    return ElasticOptions(
        min_workers=least,
        restarts=restarts,
        grace=grace,
        size=size,
        max_workers=max(most, size),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The settings of one launcher of several.

    Attributes:
        count: The number of launchers.
        rank: The number of this one; None: the order of their arrival decides.
        rendezvous: The address at which the first one listens.
        seconds: How long it waits for the others.
        only_looks: Whether there will be no job, as in `kerasdist doctor`: then the
            launchers exchange their versions, too, and those that are here at the end
            of the time go on without the others.
    """

    count: int
    rank: int | None
    rendezvous: str
    seconds: int
    only_looks: bool = False


def read_nodes(
    arguments: argparse.Namespace, faults: list[str], seconds: int = _SECONDS
) -> NodeOptions | None:
    """Return the settings; None without `--nnodes`. Sets the secret of `--secret-file`.

    Args:
        arguments: The parsed arguments.
        faults: Takes a message about each value that can't be used.
        seconds: How long the command waits for other hosts by default.
    """
    if arguments.secret_file is not None:
        _read_secret(arguments.secret_file, faults)
    given = {
        "--node-rank": arguments.node_rank,
        "--rendezvous": arguments.rendezvous,
        "--start-timeout": arguments.start_timeout,
    }
    if arguments.nnodes is None:
        _refuse_without("--nnodes", "for several hosts", given, faults)
        return None
    nnodes = arguments.nnodes
    least, colon, most = nnodes.partition(":")
    if colon and least.isdigit() and most.isdigit():
        faults.append(
            "--nnodes must be one number: the addresses of hosts that come later can't "
            f"be known. Received: --nnodes {nnodes}. Start {most} hosts with --nnodes "
            f"{most} --elastic --min-workers M: the job continues without those that "
            "are lost while at least M workers are left"
        )
        nnodes = most
    count = read_number("--nnodes", nnodes, 1, faults)
    rank = None
    if arguments.node_rank is not None:
        rank = read_number("--node-rank", arguments.node_rank, 0, faults)
        if rank >= count:
            more = f" and --nnodes {count}"
            faults.append(must_be("--node-rank", "less than --nnodes", rank, more))
    fault = (
        "it is missing"
        if arguments.rendezvous is None
        else address_fault(arguments.rendezvous)
    )
    if fault:
        faults.append(
            "--rendezvous must be the address of host 0, with a free port, as a:29400. "
            f"Received: {arguments.rendezvous!r}: {fault}"
        )
    if arguments.hosts is not None or arguments.hostfile is not None:
        faults.append(
            "--nnodes and -H, or --hostfile, can't be used together. Received: both. "
            "Expected -H where ssh reaches the hosts from this one, else --nnodes on "
            "each of them"
        )
    if count > 1 and not os.environ.get("KERASDIST_SECRET"):
        faults.append(
            "several hosts need a secret: set KERASDIST_SECRET, or --secret-file, to "
            "the same random text on all of them, for example the output of `openssl "
            "rand -hex 32`"
        )
    timeout = arguments.start_timeout or str(seconds)
    return NodeOptions(
        count=count,
        rank=rank,
        rendezvous=arguments.rendezvous or "",
        seconds=read_number("--start-timeout", timeout, 1, faults),
    )


def _read_secret(path: str, faults: list[str]) -> None:
    text = _read_text("--secret-file", path, faults)
    if text is None:
        return
    if not text.strip():
        faults.append(f"--secret-file {shlex.quote(path)} is empty")
    os.environ["KERASDIST_SECRET"] = text.strip()


def _read_text(option: str, path: str, faults: list[str]) -> str | None:
    """Return the text of an option's file; None with a fault."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        faults.append(must_be(option, "a text file", path, f": {error}"))
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """A host.

    Attributes:
        name: Its name or address, by which ssh and the other hosts reach it.
        user: The user's name there; empty: ssh knows it.
        slots: The number of workers for which it has room.
    """

    name: str
    user: str = ""
    slots: int = 1

    @property
    def target(self) -> str:
        """The destination for ssh."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def in_address(self) -> str:
        """Its name in front of a port: an IPv6 address has brackets."""
        return f"[{self.name}]" if ":" in self.name else self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The settings of a job on several hosts.

    Attributes:
        hosts: The hosts, in the order of their workers.
        ssh: The command that connects.
        python: The path of Python there.
        exported: The variables that `-x` names, and their values.
    """

    hosts: tuple[Host, ...]
    ssh: tuple[str, ...]
    python: str
    exported: Mapping[str, str]

    @property
    def slots(self) -> int:
        """The number of workers for which there is room."""
        return sum(host.slots for host in self.hosts)


def read_hosts(arguments: argparse.Namespace, faults: list[str]) -> HostOptions | None:
    """Return the settings; None if no hosts are given.

    Args:
        arguments: The parsed arguments.
        faults: Takes a message about each value that can't be used.
    """
    if arguments.hosts is None and arguments.hostfile is None:
        given = {"--ssh": arguments.ssh, "--python": arguments.python}
        given["-x"] = arguments.exported[0] if arguments.exported else None
        what = "for jobs on several hosts"
        _refuse_without("-H or --hostfile", what, given, faults)
        return None
    hosts: list[Host] = []
    if arguments.hosts is not None and arguments.hostfile is not None:
        faults.append("-H and --hostfile can't be used together")
    elif arguments.hosts is not None:
        hosts = parse_hosts(arguments.hosts, faults)
    elif (text := _read_text("--hostfile", arguments.hostfile, faults)) is not None:
        hosts = parse_hostfile(arguments.hostfile, text, faults)
    # The doctor has no such option.
    if getattr(arguments, "bind", "none") == "cores":
        faults.append("--bind cores isn't possible with several hosts")
    ssh = tuple(shlex.split(arguments.ssh or "ssh"))
    if not ssh or shutil.which(ssh[0]) is None:
        faults.append(
            f"there is no command {arguments.ssh or 'ssh'!r}. On Debian and Ubuntu: "
            "apt-get install openssh-client"
        )
    return HostOptions(
        hosts=tuple(hosts),
        ssh=ssh,
        python=arguments.python or sys.executable,
        exported=_exported(arguments.exported, faults),
    )


def _exported(texts: Sequence[str], faults: list[str]) -> Mapping[str, str]:
    exported = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in os.environ):
            what = "the name of a variable that is set, or NAME=VALUE"
            faults.append(must_be("-x", what, text))
        else:
            exported[name] = value if equals else os.environ[name]
    return exported


# "name", "user@name", "name:slots", "[address]:slots".
_HOST = re.compile(
    r"(?:(?P<user>[^@\s:,]+)@)?"
    r"(?:\[(?P<address>[0-9a-fA-F:.%\w]+)\]|(?P<name>[^@\s:,\[\]]+))"
    r"(?::(?P<slots>[1-9]\d*))?"
)
_FORM = "NAME[:SLOTS], [IPV6][:SLOTS] or USER@NAME[:SLOTS]"


def parse_hosts(text: str, faults: list[str]) -> list[Host]:
    """Return the hosts of `-H a:2,b:2`.

    Args:
        text: The option's value.
        faults: Takes a message about each part that can't be used.
    """
    hosts = []
    for part in map(str.strip, text.split(",")):
        fault = (
            f"-H must be a list of hosts with commas between, each {_FORM}. "
            f"Received: {part!r} in -H {text}"
        )
        hosts += _host(part, fault, faults)
    return _distinct(hosts, "-H", faults)


def parse_hostfile(path: str, text: str, faults: list[str]) -> list[Host]:
    """Return the hosts of a hostfile: a line each, as `name`, `name slots=2`, `name:2`.

    Args:
        path: The file's path, for messages.
        text: Its text; what follows a `#` is a comment.
        faults: Takes a message about each line that can't be used.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        joined = ":".join([words[0], *(w.removeprefix("slots=") for w in words[1:])])
        fault = (
            f"Each line of a hostfile must be {_FORM}, or NAME slots=SLOTS. "
            f"Received: {line.strip()!r} in line {number} of {path}"
        )
        hosts += _host(joined if len(words) < 3 else "", fault, faults)
    if not hosts and not faults:
        faults.append(f"--hostfile {path} has no host")
    return _distinct(hosts, "--hostfile", faults)


def _host(text: str, fault: str, faults: list[str]) -> list[Host]:
    """Return a list with the host that is named so; an empty one with a fault."""
    match = _HOST.fullmatch(text)
    if match is None:
        faults.append(fault)
        return []
    name, slots = match["address"] or match["name"], int(match["slots"] or 1)
    return [Host(name=name, user=match["user"] or "", slots=slots)]


def _distinct(hosts: list[Host], option: str, faults: list[str]) -> list[Host]:
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        faults.append(
            f"{option} must have each host once, with its number of workers. Received: "
            f"{', '.join(twice)} several times"
        )
    local = [name for name in names if _is_loopback(name)]
    if local and len(hosts) > 1:
        faults.append(
            f"{option} must have names by which the hosts reach each other. Received: "
            f"{local[0]}, which is another host on each of them. Expected this host's "
            "name or address in the network of the others"
        )
    return hosts


def _is_loopback(name: str) -> bool:
    """Return whether a name means on each host that host itself, by its text."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    return name.lower().rstrip(".") in ("localhost", "ip6-localhost")
