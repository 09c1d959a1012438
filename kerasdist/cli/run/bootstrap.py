"""The set-up of a worker's process, run before the user's script.

    python -I -S bootstrap.py PARENT GROUP CORES -- command...

    PARENT  process id of the supervisor: if it isn't our parent any more, stop
    GROUP   process group to join, or "-"
    CORES   cores to stay on, "0,1", or "-"

It is a file of its own, run by its path, because a `preexec_fn` would be code between
fork and exec, in a process that may have had threads. It imports only the standard
library, and little of that: every worker waits for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Set this process up, then execute `command`. Doesn't return."""
    parent, group, cores = argv[:3]
    command = argv[4:]
    # Second line of defence: normally the supervisor ends all workers, and the
    # launcher does if the supervisor is killed. This is for both at once.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if cores != "-":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    if os.getppid() != int(parent):
        os._exit(1)
    if group != "-":
        try:
            os.setpgid(0, int(group))
        except OSError:
            pass  # the launcher was killed in this moment; we are ended, too
    # The supervisor ignores it, and that would be inherited.
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"kerasdist run: can't start {command[0]}: {error}", file=sys.stderr)
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
