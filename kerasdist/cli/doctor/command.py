"""The command `kerasdist doctor`: runs the checks and prints their findings."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from kerasdist.cli.doctor import cluster_check, hosts_check, machine
from kerasdist.cli.doctor.machine import Finding
from kerasdist.cli.run import command as run
from kerasdist.cli.run import nodes as node_options
from kerasdist.cli.run.hosts import places as host_options
from kerasdist.placement.advice import counted

_DEVICES_SECONDS = 120.0  # importing TensorFlow from a cold network disk
# The doctor of another machine tries to reach this one four times a second.
_LISTEN_AT_LEAST = 1.0
_START_SECONDS = 60  # of other hosts, with --nnodes
_MARKS = {"ok": "  ok   ", "warn": "  WARN ", "fault": "  FAULT"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor` to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="look for faults that would keep a job from running",
        description="Check versions, devices, cluster settings, peers and memory, "
        "and print a remedy for each fault. Run it with the environment of the "
        "job, on all machines at the same time: while it runs, it listens at this "
        "task's address. With -H or --nnodes, and the options that `kerasdist run` has "
        "with them, check the hosts of such a job instead: those of -H from this one, "
        "those of --nnodes by starting this command on all of them. Exit code 0 if "
        "nothing is wrong, else 1.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="seconds to try to reach the peers, and for a host those of other hosts "
        "(default: 5)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of text"
    )
    host_options.add_options(parser)
    node_options.add_options(parser, _START_SECONDS)
    # An option of `run` alone.
    parser.set_defaults(parser=parser, handler=_run, bind="none")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds above 0. Received: {text!r}"
        )
    return seconds


def _run(arguments: argparse.Namespace) -> int:
    faults: list[str] = []
    hosts = host_options.read_options(arguments, faults)
    number = functools.partial(run.read_number, faults=faults)
    nodes = node_options.read_options(arguments, number, faults)
    if faults:
        arguments.parser.error("\n  ".join(faults))
    if hosts is not None:
        job = hosts_check.check_hosts(hosts, arguments.timeout)
    elif nodes is not None:
        nodes = dataclasses.replace(nodes, only_looks=True)
        job = hosts_check.check_nodes(nodes, arguments.timeout, os.environ)
    else:
        job = _cluster_sections(arguments.timeout, os.environ)
    counts = {"ok": 0, "warn": 0, "fault": 0}
    sections = []
    for title, found in _sections(job):
        for finding in found:
            counts[finding.level] += 1
        if arguments.document is None:
            _print(title, found)
        findings = [dataclasses.asdict(finding) for finding in found]
        sections.append({"name": title, "findings": findings})
    if arguments.document is not None:
        arguments.document.update(counts=counts, sections=sections)
    else:
        print(_last_line(counts))
    return 1 if counts["fault"] else 0


def _last_line(counts: Mapping[str, int]) -> str:
    if counts["fault"]:
        return f"{counted(counts['fault'], 'fault')}: see the lines that begin with ->"
    warnings = counts["warn"]
    return "no faults" + (f", {counted(warnings, 'warning')}" if warnings else "")


def _sections(
    job: Iterator[tuple[str, list[Finding]]],
) -> Iterator[tuple[str, list[Finding]]]:
    """Yield the titles and findings, each as soon as it is known, with the job's."""
    environ = os.environ
    yield "versions", machine.check_versions(environ)
    yield "cores", machine.check_cores()
    yield "allocator", machine.check_allocator(environ)
    yield "shared memory", machine.check_shared_memory()
    yield from job
    yield "devices", machine.check_devices(_DEVICES_SECONDS)


def _cluster_sections(
    seconds: float, environ: Mapping[str, str]
) -> Iterator[tuple[str, list[Finding]]]:
    """Yield those of the cluster that the environment has."""
    cluster, found = cluster_check.check_cluster(environ)
    yield "cluster", found
    if cluster is not None and (cluster.workers or cluster.servers):
        yield "secret", cluster_check.check_secret(cluster, environ)
        yield "encryption", machine.check_encryption(cluster, environ)
        began = time.monotonic()
        with cluster_check.own_port(cluster, environ) as found:
            yield "own port", found
            peers = cluster_check.check_peers(cluster, seconds)
            yield "peers", peers
            if peers:
                time.sleep(max(0.0, began + _LISTEN_AT_LEAST - time.monotonic()))
    elif environ.get("KERASDIST_TLS", "").strip():
        # `kerasdist run` will use it.
        yield "encryption", machine.check_encryption(None, environ)


def _print(title: str, found: Sequence[Finding]) -> None:
    print(f"{title}:")
    for finding in found:
        first, *rest = finding.text.splitlines()
        print(f"{_MARKS[finding.level]} {first}")
        for line in rest:
            print(f"          {line}")
        if finding.remedy:
            print(f"          -> {finding.remedy}")
    sys.stdout.flush()
