"""The doctor's checks of the hosts of `kerasdist run -H` and `--nnodes`.

The launcher's code asks them, or meets them, and no task is started. The sections are
yielded as soon as they are known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from kerasdist.cli.doctor.cluster_check import check_peers, check_secret
from kerasdist.cli.doctor.machine import Finding, check_encryption
from kerasdist.cli.run.hosts.check import (
    ANSWER_SECONDS,
    HostProbe,
    asking,
    await_answers,
    differences,
    faults_of,
)
from kerasdist.cli.run.hosts.places import Host, HostOptions, Place
from kerasdist.cli.run.hosts.probe import facts
from kerasdist.cli.run.nodes import LocalPart, NodeOptions, RendezvousError, meeting
from kerasdist.cluster import Cluster
from kerasdist.cluster.address import split_address

_Sections = Iterator[tuple[str, list[Finding]]]
_NOT_LOOKED_AT = """
Not looked at: the script, and what other hosts have of cores, memory, {more}
(run `kerasdist doctor` there); cluster settings of the environment, which
`kerasdist run` replaces"""
# Seconds for the way of a question and its answer, and for a launcher that is late.
_MORE_SECONDS = 10


def check_hosts(options: HostOptions, seconds: float) -> _Sections:
    """Ask the hosts of `-H` what the launcher asks; let them reach each other.

    Args:
        options: The settings.
        seconds: How long a host tries to reach another one.
    """
    names = ", ".join(host.target for host in options.hosts)
    text = f"a job on hosts that ssh reaches: {names}"
    text += _NOT_LOOKED_AT.format(more="certificates and devices but GPUs")
    yield "cluster", [Finding(level="ok", text=text)]
    counts = dict.fromkeys(options.hosts, 1)
    with asking(options, counts, (), finds_gpus=True, listens=True) as (_, probes):
        here = facts(os.getcwd(), [])
        answers = {each: each.result() for each in probes}
        yield (
            "hosts",
            [
                finding
                for each, answer in answers.items()
                for finding in _of_host(each.host, answer, here)
            ],
        )
        if len(probes) > 1:
            yield "ports", _reach_each_other(answers, seconds)


def _of_host(
    host: Host, answer: dict[str, Any] | str, here: Mapping[str, Any]
) -> list[Finding]:
    found = [
        Finding(level="fault", text=text, remedy=_remedy(host, answer, text))
        for text in faults_of(host, answer, here)
    ]
    if isinstance(answer, str):
        return found
    gpus, why_not = answer["gpus"]
    if why_not:
        remedy = "correct that, or start the job with --gpus none"
        text = f"{host.target} can't list its GPUs: {why_not}"
        found.append(Finding(level="warn", text=text, remedy=remedy))
    if not found:
        text = f"{host.target} has the folder and versions of this host; GPUs: "
        found.append(Finding(level="ok", text=text + str(len(gpus))))
    return found


def _remedy(host: Host, answer: dict[str, Any] | str, text: str) -> str:
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
    answers: Mapping[HostProbe, dict[str, Any] | str], seconds: float
) -> list[Finding]:
    """Let each host connect to a port of each other one, as their tasks will."""
    addresses: dict[HostProbe, str] = {}
    found = []
    for each, answer in answers.items():
        if isinstance(answer, str) or not answer["addresses"]:
            text = f"no port of {each.host.target} was tried, which can't be used"
            found.append(Finding(level="warn", text=text, remedy="correct that first"))
            continue
        family, bound = answer["addresses"][0]
        place = Place(host=each.host, family=family, address=tuple(bound))
        addresses[each] = place.text
    others = {
        each: [address for other, address in addresses.items() if other is not each]
        for each in addresses
    }
    for each, listed in others.items():
        each.ask_again({"addresses": listed, "seconds": seconds})
    limit = seconds + ANSWER_SECONDS
    await_answers(list(others), limit)
    for each, listed in others.items():
        name, reply = each.host.target, each.result(limit)
        if isinstance(reply, str):
            text = f"{name} can't try to reach the others: {reply}"
            remedy = "correct what is said of that host above"
            found.append(Finding(level="warn", text=text, remedy=remedy))
            continue
        reasons = dict(zip(listed, reply["unreachable"], strict=True))
        lost = {address: why for address, why in reasons.items() if why is not None}
        found += [
            Finding(
                level="fault",
                text=f"{name} can't reach {address}: {why}",
                remedy="look at the firewalls between the two, which must let all "
                "ports pass, and at whether the name means the same host on both",
            )
            for address, why in lost.items()
        ]
        if listed and not lost:
            text = f"{name} reaches {', '.join(listed)}"
            found.append(Finding(level="ok", text=text))
    return found


def check_nodes(
    options: NodeOptions, seconds: float, environ: Mapping[str, str]
) -> _Sections:
    """Meet the doctors of the other hosts as launchers of `--nnodes` meet.

    Args:
        options: The settings.
        seconds: How long to try to reach the port of another host.
        environ: The environment.
    """
    text = f"a job of {options.count} hosts, which meet at {options.rendezvous}"
    text += _NOT_LOOKED_AT.format(more="certificates and devices")
    yield "cluster", [Finding(level="ok", text=text)]
    place = Cluster(rank=0, size=1, workers=(options.rendezvous,))
    found = check_secret(place, environ) if options.count > 1 else []
    if found:
        yield "secret", found
    encryption = check_encryption(place, environ)
    yield "encryption", encryption
    if any(each.level == "fault" for each in (*found, *encryption)):
        text = "the other hosts weren't met: the secret or the certificates are wrong"
        yield "hosts", [Finding(level="warn", text=text, remedy="correct that first")]
        return
    secret = environ.get("KERASDIST_SECRET", "").encode()
    remedy = (
        f"start this command at the same time on all {options.count} hosts, with the "
        f"same secret; they must reach {options.rendezvous}"
    )
    try:
        with meeting(options, 1, 0, secret) as part:
            rank = sorted(part.facts)[part.first["worker"]]
            yield "hosts", _of_nodes(options, part, rank, remedy)
            workers = tuple(part.cluster["worker"])
            index = part.first["worker"]
            cluster = Cluster(rank=index, size=len(workers), workers=workers)
            hosts = zip(workers, sorted(part.facts), strict=True)
            names = {address: f"host {number} ({address})" for address, number in hosts}
            yield "peers", check_peers(cluster, seconds, names=names)
            # Others may still try to reach this one: all leave together.
            again = dataclasses.replace(
                options,
                count=len(workers),
                rank=index,
                seconds=math.ceil(seconds) + _MORE_SECONDS,
            )
            with (
                contextlib.suppress(RendezvousError),
                meeting(again, 1, 0, secret),
            ):
                pass
    except RendezvousError as error:
        yield "hosts", [Finding(level="fault", text=str(error), remedy=remedy)]


def _of_nodes(
    options: NodeOptions, part: LocalPart, rank: int, remedy: str
) -> list[Finding]:
    """Tell which hosts came, and in what they differ from this one."""
    found = []
    for address, (number, there) in zip(
        part.cluster["worker"], sorted(part.facts.items()), strict=True
    ):
        name = f"host {number} ({split_address(address)[0]})"
        faults = differences(name, there, part.facts[rank])
        same = "is this one" if number == rank else "is here, with the same versions"
        if not faults:
            found.append(Finding(level="ok", text=f"{name} {same}"))
        found += [
            Finding(level="fault", text=each, remedy="install the same on all hosts")
            for each in faults
        ]
    missing = sorted({*range(options.count)} - {*part.facts})
    refused = [f"refused: {each}" for each in part.refused]
    if missing:
        text = f"{len(missing)} of {options.count} hosts didn't come in time"
        if options.rank is not None:
            text += f": host {', '.join(map(str, missing))}"
        text = "\n".join([f"{text} (--start-timeout {options.seconds})", *refused])
        found.append(Finding(level="fault", text=text, remedy=remedy))
    elif refused:
        text = "\n".join(["others were refused before all were here", *refused])
        remedy = "nothing, if these were earlier attempts; else end those processes"
        found.append(Finding(level="warn", text=text, remedy=remedy))
    return found
