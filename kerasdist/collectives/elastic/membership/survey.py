"""The survey of a job's tasks: which processes answer, and which are members.

    answers     its process lives; it names the members of its epoch, if it has one
    left        its process lives, and isn't in the job any more
    absent      nothing listens at its address, or a process that isn't of this job
    unclear     anything else: its process may be slow, or frozen for a moment

An unclear task may be a member. A process that took all members for absent tasks would
wait for the start of a job that runs already. So the unclear ones are asked again, and
those that have left: they may be about to join.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kerasdist.collectives.elastic.membership.lines import Answer, Left, Lines
from kerasdist.errors import AuthenticationError, ProtocolError
from kerasdist.transport.deadline import Deadline

# Tasks that are asked at once; the others are asked only if none of these answers.
_MOST_QUESTIONS = 16
# Times that a task is asked.
_MOST_TIMES = 3
# Seconds until those that have left are asked again.
_AGAIN_SECONDS = 0.5


@dataclasses.dataclass
class Survey:
    """The state of the other tasks; absent ones aren't named.

    Attributes:
        answers: The answers.
        left: The tasks that have left.
        unclear: The unclear ones.
    """

    answers: list[Answer] = dataclasses.field(default_factory=list)
    left: list[int] = dataclasses.field(default_factory=list)
    unclear: list[int] = dataclasses.field(default_factory=list)

    @property
    def shows_a_job(self) -> bool:
        """Whether the job runs already."""
        return any(each.shows_a_job for each in self.answers)


def survey(
    lines: Lines, *, members: bool = False, deadline: Deadline | None = None
) -> Survey:
    """Ask the other tasks, a few at a time, until some answer.

    The unclear ones are asked again until an answer shows that the job runs, but three
    times at most.

    Args:
        lines: This process's lines.
        members: Whether only those count that are members of an epoch.
        deadline: When to give up.
    """
    found = _ask(lines, lines.others, members, deadline)
    for _ in range(_MOST_TIMES - 1):
        again = sorted({*found.unclear, *found.left})
        late = deadline is not None and deadline.expired
        if not again or found.shows_a_job or late:
            break
        if not found.unclear:
            time.sleep(_AGAIN_SECONDS)
        more = _ask(lines, again, members, deadline)
        found = Survey(found.answers + more.answers, more.left, more.unclear)
    return found


def _ask(
    lines: Lines, numbers: Sequence[int], members: bool, deadline: Deadline | None
) -> Survey:
    """Ask some tasks once."""
    found = Survey()

    def ask(number: int) -> Answer | None:
        try:
            return lines.ask(number, deadline)
        except Left:
            found.left.append(number)
        except (ConnectionRefusedError, AuthenticationError, ProtocolError):
            pass
        except (OSError, EOFError):
            found.unclear.append(number)
        return None

    with ThreadPoolExecutor(_MOST_QUESTIONS, "kerasdist-survey") as pool:
        for begin in range(0, len(numbers), _MOST_QUESTIONS):
            some = numbers[begin : begin + _MOST_QUESTIONS]
            answers = [each for each in pool.map(ask, some) if each is not None]
            found.answers += [each for each in answers if each.members or not members]
            if found.answers:
                break
    return found
