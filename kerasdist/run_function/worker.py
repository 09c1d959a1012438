"""The script of a worker or server that calls a function: `python -m` runs it."""

from __future__ import annotations

import logging
import os
import stat
import sys
from types import TracebackType

from kerasdist.run_function.launcher import (
    CALL_VARIABLE,
    RESULT_VARIABLE,
    frames_of_user,
    write_error,
    write_value,
)
from kerasdist.run_function.run import load_call
from kerasdist.transport.liveness.failure_protocol import hand_over_final_error
from kerasdist.transport.liveness.launcher_pipe import descriptor_named

_LOG = logging.getLogger("kerasdist")


def main() -> None:
    """Call the function, and write its result or its error; ends as a script does."""
    call, result = _descriptor(CALL_VARIABLE), _descriptor(RESULT_VARIABLE)
    hand_over_final_error()
    stage, kind = "load", ""
    try:
        function = load_call(call)
        os.close(call)
        stage = "call"
        value = function()
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        stage, kind = "result", name.removeprefix("builtins.")
        write_value(result, value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A server ends in this way in the constructor of its strategy.
        if not (isinstance(error, SystemExit) and not error.code):
            try:
                write_error(result, stage, error, kind)
            except OSError as fault:
                # A full disk. The launcher shows the traceback.
                text = "kerasdist: the error of the function can't be sent: %s"
                _LOG.error(text, fault)
            _shorten_traceback()
        raise


def _descriptor(variable: str) -> int:
    descriptor = descriptor_named(os.environ.pop(variable, ""), stat.S_ISREG)
    if descriptor is None:
        raise SystemExit("This module is run by `kerasdist.run`, not by hand.")
    # Processes that the function starts have no part in it.
    os.set_inheritable(descriptor, False)
    return descriptor


def _shorten_traceback() -> None:
    """Let the traceback that is printed begin with the function's."""
    # Perhaps the strategy's, or the user's.
    shown = sys.excepthook

    def hook(
        kind: type[BaseException],
        error: BaseException,
        frames: TracebackType | None,
    ) -> None:
        frames = frames_of_user(frames)
        shown(kind, error.with_traceback(frames), frames)

    sys.excepthook = hook


if __name__ == "__main__":
    main()
