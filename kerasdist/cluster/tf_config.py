"""Cluster settings of TF_CONFIG's shape, parsed, with a list of all their faults.

    {"cluster": {"chief": [address], "worker": [address, ...], "ps": [...]},
     "task": {"type": "worker", "index": 0}}

`tf.train.ClusterSpec` also allows `{index: address}` instead of a list, and
TensorFlow 1 used "master" for "chief": both are accepted. Other keys
("environment", "rpc_layer", ...) are ignored.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
from collections.abc import Mapping
from typing import Any

from kerasdist.cluster.address import address_fault, same_address_key
from kerasdist.errors import ClusterError

# The time between SIGTERM and SIGKILL on the platform that runs a job.

GRACE_VARIABLE = "KERASDIST_GRACE_SECONDS"
# The default of Kubernetes (terminationGracePeriodSeconds) and Slurm (KillWait).
_SECONDS = 30.0


def grace_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Return the seconds that the platform lets a process live after SIGTERM.

    Args:
        environ: The environment; the process's by default.

    Raises:
        ClusterError: The variable isn't a positive number.
    """
    environ = os.environ if environ is None else environ
    given = environ.get(GRACE_VARIABLE, "")
    if not given:
        return _SECONDS
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ClusterError(
            f"The variable {GRACE_VARIABLE} must be a positive number of seconds. "
            f"Received: {given!r}. Set it to the time after which the platform kills a "
            "process that it has sent SIGTERM, or leave it unset for 30 s."
        )
    return seconds


TASK_TYPES = ("chief", "worker", "ps", "evaluator")
_EXPECTED_TYPES = "'chief', 'worker', 'ps' or 'evaluator'"


def load_json(text: str, name: str) -> tuple[object, list[str]]:
    """Parse JSON.

    Args:
        text: The JSON.
        name: What to call it in a fault.

    Returns:
        What it holds, and the faults; `(None, [fault])` if it isn't JSON.
    """
    try:
        return json.loads(text), []
    except json.JSONDecodeError as error:
        around = text[max(0, error.pos - 15) : error.pos + 15]
        hint = ""
        if "'" in text and '"' not in text:
            hint = " JSON wants double quotes around names and texts."
        return None, [
            f"{name} isn't JSON: {error.msg} at line {error.lineno}, column "
            f"{error.colno}, near {around!r}.{hint} Python's json.dumps(...) writes "
            "it without mistakes."
        ]
    except (RecursionError, ValueError) as error:
        return None, [f"{name} isn't usable JSON: {error}."]


def read_task(jobs: object, task: object) -> tuple[dict[str, Any], list[str]]:
    """Read the place of this process among the tasks of its job.

    Args:
        jobs: The "cluster" part: job name -> addresses. None or empty: no others.
        task: The "task" part: "type" and "index".

    Returns:
        The arguments of `Cluster` but `source` (none if there are faults) and all
        faults, each a sentence or two.
    """
    faults: list[str] = []
    lists = _read_jobs(jobs, faults)
    task_type, index = _read_own(task, bool(lists), faults)
    if task_type is not None and index is not None and not faults:
        faults += _place_faults(lists, task_type, index)
    if faults or task_type is None or index is None:
        return {}, faults
    servers = tuple(lists.get("ps", ()))
    chiefs = lists.get("chief", [])
    workers = (*chiefs, *lists.get("worker", ()))
    rank: int | None
    if task_type == "evaluator":
        # Not part of the training job: it only reads checkpoints.
        workers, servers, rank = (), (), 0
    elif task_type == "ps":
        rank = None
    elif task_type == "worker":
        rank = len(chiefs) + index
    else:
        rank = 0
    found = {"rank": rank, "size": max(1, len(workers)), "workers": workers}
    return found | {"servers": servers, "task_type": task_type, "task_index": index}, []


def _read_jobs(jobs: object, faults: list[str]) -> dict[str, list[str]]:
    """Return the addresses of each job that has some, "master" as "chief"."""
    if jobs is None:
        return {}
    if not isinstance(jobs, Mapping):
        faults.append(
            f"'cluster' is a {type(jobs).__name__}. Received: cluster={jobs!r}. "
            "Expected a dictionary from task types to lists of addresses."
        )
        return {}
    lists: dict[str, list[str]] = {}
    for name, tasks in jobs.items():
        job = "chief" if name == "master" else name
        if job not in TASK_TYPES:
            faults.append(
                f"'cluster' has an unknown task type. Received: {name!r}. "
                f"Expected {_EXPECTED_TYPES}."
            )
            continue
        if job in lists:
            faults.append(
                "'cluster' has both 'chief' and 'master', which is an old name of "
                "the same. Leave 'master' out."
            )
            continue
        addresses = _read_addresses(str(name), tasks, faults)
        # Scripts often write an empty list of servers. Without workers, however,
        # there is no job: a template that was filled in with nothing.
        if job == "worker" and addresses == []:
            faults.append(
                "cluster['worker'] is empty. Expected at least one address; leave "
                "'worker' out if the chief is to train alone."
            )
        if addresses:
            lists[job] = addresses
    if len(lists.get("chief", ())) > 1:
        faults.append(
            f"'cluster' has {len(lists['chief'])} chiefs. Received: "
            f"cluster['chief']={lists['chief']!r}. Expected one; the others are "
            "workers."
        )
    if lists and not faults and not lists.keys() & {"chief", "worker"}:
        faults.append(
            f"'cluster' has no task that trains. Received: {sorted(lists)}. "
            "Expected a 'chief', or at least one 'worker'."
        )
    faults += _repeated(lists)
    return lists


def _read_addresses(name: str, tasks: object, faults: list[str]) -> list[str] | None:
    """Return one job's addresses by index; None if its shape is wrong."""
    where = f"cluster[{name!r}]"
    if isinstance(tasks, Mapping):
        by_index: dict[int, object] = {}
        for key, address in tasks.items():
            number = _integer(key)
            if number is None or number in by_index:
                faults.append(
                    f"{where} has an index that is no integer >= 0, or has it twice. "
                    f"Received: {key!r}. Expected 0..{len(tasks) - 1}."
                )
                return None
            by_index[number] = address
        gaps = sorted(set(range(len(by_index))) - by_index.keys())
        if gaps:
            faults.append(
                f"{where} has gaps. Received: the indices {sorted(by_index)}. Expected "
                f"0..{len(by_index) - 1}: all of them must know each other."
            )
            return None
        items = [by_index[i] for i in range(len(by_index))]
    elif isinstance(tasks, (list, tuple)):
        items = list(tasks)
    else:
        faults.append(
            f"{where} is a {type(tasks).__name__}. Received: {where}={tasks!r}. "
            "Expected a list of addresses, for example ['host1:2222', 'host2:2222']."
        )
        return None
    for i, address in enumerate(items):
        fault = address_fault(address)
        if fault is not None:
            faults.append(
                f"{where}[{i}] {fault}. Received: {where}[{i}]={address!r}. Expected "
                "'host:port', for example 'host1:2222'."
            )
    return [str(address) for address in items]


def _repeated(lists: Mapping[str, list[str]]) -> list[str]:
    """Describe every address that occurs twice."""
    faults = []
    seen: dict[tuple[str, int], str] = {}
    for job, addresses in lists.items():
        for i, address in enumerate(addresses):
            if address_fault(address) is not None:
                continue
            where = f"cluster[{job!r}][{i}]"
            first = seen.setdefault(same_address_key(address), where)
            if first != where:
                faults.append(
                    f"The same address stands at two places, {first} and {where}. "
                    f"Received: {address!r}. Expected one address for each process: "
                    "on one host give each its own port."
                )
    return faults


def _read_own(
    task: object, others: bool, faults: list[str]
) -> tuple[str | None, int | None]:
    """Return this process's task type and index; None for what is wrong."""
    if task is None or task == {}:
        if not others:
            return "worker", 0
        faults.append(
            "There is no 'task': it is unknown which one of the cluster's tasks this "
            'process is. Expected "task": {"type": "worker", "index": 0}, with '
            "another index on every worker."
        )
        return None, None
    if not isinstance(task, Mapping):
        faults.append(
            f"'task' is a {type(task).__name__}. Received: task={task!r}. Expected a "
            'dictionary, for example {"type": "worker", "index": 0}.'
        )
        return None, None
    task_type: str | None = None
    given = task.get("type")
    if given == "master":
        given = "chief"
    if given is None:
        faults.append(
            f"'task' has no 'type'. Received: task={dict(task)!r}. Expected "
            f"{_EXPECTED_TYPES}."
        )
    elif isinstance(given, str) and given in TASK_TYPES:
        task_type = given
    else:
        faults.append(
            f"task['type'] is unknown. Received: task['type']={given!r}. Expected "
            f"{_EXPECTED_TYPES}."
        )
    index = _integer(task.get("index"))
    if task.get("index") is None:
        # There is only one chief, so nothing is left open.
        if task_type == "chief":
            return task_type, 0
        faults.append(
            f"'task' has no 'index'. Received: task={dict(task)!r}. Expected an "
            "integer >= 0, the place in the list of that type."
        )
    elif index is None:
        faults.append(
            "task['index'] is no integer >= 0. Received: "
            f"task['index']={task['index']!r}. Expected the place in the list of that "
            "type, counted from 0."
        )
    return task_type, index


def _place_faults(
    lists: Mapping[str, list[str]], task_type: str, index: int
) -> list[str]:
    """Check that this process stands in the cluster."""
    if task_type == "evaluator" and "evaluator" not in lists:
        return []  # it is usually not listed: no process connects to it
    if not lists:
        if index == 0 and task_type != "ps":
            return []  # alone: what operators write for a job of one
        return [
            f"There is no 'cluster', yet this process is {task_type} {index}: there "
            "must be others, and their addresses are missing. Expected "
            '"cluster": {"worker": ["host1:2222", "host2:2222"]}.'
        ]
    if task_type not in lists:
        return [
            f"This process is a {task_type}, and the cluster has none. Received: "
            f"task['type']={task_type!r}, cluster with {sorted(lists)}."
        ]
    count = len(lists[task_type])
    if index >= count:
        return [
            f"task['index'] is out of range. Received: task['index']={index}, and "
            f"cluster[{task_type!r}] has {count} "
            f"address{'es' if count > 1 else ''}. Expected "
            + (f"0..{count - 1}." if count > 1 else "0.")
        ]
    return []


def _integer(value: object) -> int | None:
    """Return an integer >= 0, also from its digits; None for anything else.

    Digits are taken because templates of job files put everything in quotes.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return int(value) if re.fullmatch("[0-9]{1,9}", value) else None
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
    return number if number >= 0 else None
