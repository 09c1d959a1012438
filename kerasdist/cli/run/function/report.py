"""The report to the caller about the end of a job that ran a function."""

from __future__ import annotations

from collections.abc import Sequence

from kerasdist.cli.run.exits import in_words
from kerasdist.cli.run.function.files import FunctionFiles
from kerasdist.cli.run.spawn import Started


def send_outcome(
    files: FunctionFiles, tasks: Sequence[Started], first: Started | None
) -> None:
    """Send how each task ended, and its result's file.

    Args:
        files: The job's files.
        tasks: All tasks, which have ended.
        first: The one that caused the job's failure, if it failed.
    """
    for each in tasks:
        if each.result_file is None:
            continue
        code = each.code
        ended = "was ended by the launcher" if code is None else in_words(code)
        message = {
            "kind": each.task.kind,
            "index": each.task.index,
            "code": code,
            "ended": ended,
            "by_launcher": each.ended_by_us,
            "first": each is first,
        }
        files.send(message, each.result_file.fileno())
