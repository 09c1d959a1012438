"""`kerasdist run` as a process of `kerasdist.run`.

    python -m kerasdist.cli.run.function CALLER OPTIONS...

    CALLER  process id of the caller

When the caller ends, in whatever way, this process ends the job.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from kerasdist.cli import main
from kerasdist.cli.run.job_spec import ENDING_SIGNALS

_PR_SET_PDEATHSIG = 1


def run(caller: int, options: list[str]) -> int:
    """Run the command; return its exit code.

    Args:
        caller: Process id of the caller.
        options: What follows `kerasdist run`.
    """
    # A notebook's server may run under `nohup`; this process isn't ended by a terminal.
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            interrupt = number == signal.SIGINT
            default = signal.default_int_handler if interrupt else signal.SIG_DFL
            signal.signal(number, default)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The kernel of a notebook is often killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    if os.getppid() != caller:
        return 1
    return main(["run", *options])


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
