"""The start of a task that runs on one of several hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from kerasdist.cli.run.hosts import agent, client
from kerasdist.cli.run.hosts.places import Place
from kerasdist.cli.run.hosts.reach import MOST_SHARED, Reach, program_text

# Of the launcher's environment, what tasks on other hosts get, besides `-x`.
_PREFIXES = (
    *("KERASDIST_", "KERAS_", "TF_", "XLA_", "OMP_", "NCCL_", "MKL_", "OPENBLAS_"),
    "PYTHON",
)
# Of this host alone.
_LOCAL = (
    *("KERASDIST_REMOTE", "KERASDIST_ERROR_FD", "KERASDIST_REPORT_FD"),
    "KERASDIST_STDERR_FD",
    *("KERASDIST_CALL_FD", "KERASDIST_RESULT_FD"),
)


class TasksOnHosts:
    """The commands of tasks on their hosts.

    Args:
        places: The place of each task.
        reach: How hosts are reached.
        exported: Names of variables that tasks get beside those of kerasdist,
            TensorFlow, Keras and Python.
        gpus: What `find_gpus` returns on each host, by its name.

    Attributes:
        places: The place of each task.
        gpus: As given.
    """

    def __init__(
        self,
        places: Mapping[tuple[str, int], Place],
        reach: Reach,
        exported: Collection[str],
        gpus: Mapping[str, tuple[Sequence[str], str]],
    ) -> None:
        self.places = places
        self.gpus = gpus
        self._reach = reach
        self._exported = exported
        self._alone: set[tuple[str, int]] = set()
        for host in {place.host for place in places.values()}:
            there = [task for task in places if places[task].host == host]
            self._alone.update(there[MOST_SHARED:])
        self._client = str(Path(client.__file__))
        self._program = program_text(str(agent.__file__)).decode()

    def workers_by_host(self) -> dict[str, int]:
        """Return the largest number of workers of each host, by its name."""
        count: dict[str, int] = {}
        for (kind, _), place in self.places.items():
            count[place.host.name] = count.get(place.host.name, 0) + (kind == "worker")
        return count

    def command(
        self,
        task: tuple[str, int],
        command: Sequence[str],
        environ: Mapping[str, str],
        window: tuple[int, int] | None,
        mine: Collection[str],
    ) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and the environment of the process on this host.

        Args:
            task: Its kind and index, as `TF_CONFIG` has them.
            command: The arguments of its interpreter.
            environ: Its environment, as if it were on this host.
            window: The terminal's lines and columns, if its output is shown there.
            mine: The names of variables that are the task's own.
        """
        place = self.places[task]
        exported = {
            name: value
            for name, value in environ.items()
            if name not in _LOCAL
            and (
                name.startswith(_PREFIXES)
                or name == "LD_PRELOAD"
                or name in self._exported
                or name in mine
            )
        }
        facts = {
            "host": place.host.target,
            "reach": self._reach.command(
                place.host, "-I", "-S", alone=task in self._alone
            ),
            "program": self._program,
            "task": {
                "folder": os.getcwd(),
                "command": list(command),
                "environ": exported,
                "family": place.family,
                "address": place.address,
                "window": window,
                "errors": task == ("worker", 0),
            },
        }
        return [self._client], {**environ, "KERASDIST_REMOTE": json.dumps(facts)}
