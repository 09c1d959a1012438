"""The survey of a job's tasks: which processes answer, and which are members.

    answers     its process lives; it names the members of its epoch, if it has one
    absent      nothing listens at its address, or a process that isn't of this job
    unclear     anything else: its process may be slow, or frozen for a moment

An unclear task may be a member. A process that took all members for absent tasks would
wait for the start of a job that runs already. So the unclear ones are asked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kerasdist.collectives.elastic.membership.lines import Answer, Lines
from kerasdist.errors import AuthenticationError, ProtocolError
from kerasdist.transport.deadline import Deadline

__all__ = ["survey"]

# Tasks that are asked at once; the others are asked only if none of these answers.
_MOST_QUESTIONS = 16
# Times that a task is asked.
_MOST_TIMES = 3


def survey(
    lines: Lines, *, members: bool = False, deadline: Deadline | None = None
) -> list[Answer]:
    """Ask the other tasks, a few at a time, until some answer; return the answers.

    The unclear ones are asked again until an answer shows that the job runs, but three
    times at most.

    Args:
        lines: This process's lines.
        members: Whether only those count that are members of an epoch.
        deadline: When to give up.
    """
    answers, unclear = _ask(lines, lines.others, members, deadline)
    for _ in range(_MOST_TIMES - 1):
        if not unclear or any(each.shows_a_job for each in answers):
            break
        if deadline is not None and deadline.expired:
            break
        more, unclear = _ask(lines, unclear, members, deadline)
        answers += more
    return answers


def _ask(
    lines: Lines, numbers: Sequence[int], members: bool, deadline: Deadline | None
) -> tuple[list[Answer], list[int]]:
    """Return the answers of some tasks, and those that are unclear."""
    unclear: list[int] = []

    def ask(number: int) -> Answer | None:
        try:
            return lines.ask(number, deadline)
        except (ConnectionRefusedError, AuthenticationError, ProtocolError):
            return None
        except (OSError, EOFError):
            unclear.append(number)
            return None

    with ThreadPoolExecutor(_MOST_QUESTIONS, "kerasdist-survey") as pool:
        for begin in range(0, len(numbers), _MOST_QUESTIONS):
            some = numbers[begin : begin + _MOST_QUESTIONS]
            found = [each for each in pool.map(ask, some) if each is not None]
            found = [each for each in found if each.members or not members]
            if found:
                return found, sorted(unclear)
    return [], sorted(unclear)
