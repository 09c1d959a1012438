"""The files of a job that runs a function: its call, and the result of each task."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import stat
from collections.abc import MutableMapping, Sequence

from kerasdist.functions.launcher import (
    CALL_VARIABLE,
    OUTCOME_VARIABLE,
    RESULT_VARIABLE,
)
from kerasdist.transport.liveness.launcher_pipe import (
    descriptor_in_words,
    descriptor_named,
)

# The caller reads all the time, unless it is stopped.
_SEND_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class FunctionFiles:
    """The descriptors that the caller has given the launcher.

    Attributes:
        call: Descriptor of the file with the call.
        outcome: Socket that takes the outcome, a message for each task.
    """

    call: int
    outcome: socket.socket

    @staticmethod
    def take_from(environ: MutableMapping[str, str]) -> FunctionFiles | None:
        """Return the files; None if the job runs a script.

        Args:
            environ: The environment, which isn't to pass them on.
        """
        call = descriptor_named(environ.pop(CALL_VARIABLE, ""), stat.S_ISREG)
        outcome = descriptor_named(environ.pop(OUTCOME_VARIABLE, ""), stat.S_ISSOCK)
        if call is None or outcome is None:
            return None
        for descriptor in (call, outcome):
            os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=outcome)
        sock.settimeout(_SEND_SECONDS)
        return FunctionFiles(call, sock)

    def environ(self, result: int) -> dict[str, str]:
        """Return the variables of a task.

        Args:
            result: Descriptor of its result's file.
        """
        return {
            CALL_VARIABLE: descriptor_in_words(self.call),
            RESULT_VARIABLE: descriptor_in_words(result),
        }

    def refuse(self, faults: Sequence[str]) -> None:
        """Report why nothing was started."""
        self.send({"faults": list(faults)})

    def send(self, message: object, descriptor: int | None = None) -> None:
        """Send a message to the caller; it may have ended.

        Args:
            message: Of JSON's types.
            descriptor: A descriptor that is sent along.
        """
        data = json.dumps(message).encode()
        passed = [] if descriptor is None else [descriptor]
        try:
            socket.send_fds(self.outcome, [data], passed)
        except OSError:
            # It sees that a message is missing, or doesn't exist any more.
            pass
