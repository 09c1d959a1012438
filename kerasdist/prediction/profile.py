"""The step of one worker, as it was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from kerasdist.prediction.links import HostLink
from kerasdist.transport.framing import from_plain, to_object


class GradientMessage(NamedTuple):
    """A collective of a step.

    Attributes:
        kind: "all_reduce" or "all_gather".
        size: The bytes of each rank.
        ready: The part of the gradients that is computed before it, 0 to 1.
    """

    kind: str
    size: int
    ready: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """The step of one worker.

    Attributes:
        rows: Samples of a step.
        compute: Seconds of the forward and the backward pass, of each measured step.
        input: Seconds in which a step waits for its batch.
        update: Seconds of the optimizer's update.
        outside: Seconds between two steps.
        messages: What is sent in a step, in order; empty with one worker.
        weights: Bytes of all weights that are trained.
        steps: Steps of an epoch; 0 if that isn't known.
        link: The measured link; None with one worker.
    """

    rows: float
    compute: tuple[float, ...]
    input: float = 0.0
    update: float = 0.0
    outside: float = 0.0
    messages: tuple[GradientMessage, ...] = ()
    weights: int = 0
    steps: int = 0
    link: HostLink | None = None

    def __post_init__(self) -> None:
        wrong = not self.compute or min(self.compute) <= 0 or self.rows <= 0
        if wrong or min(self.input, self.update, self.outside) < 0:
            raise ValueError(
                "A profile must have rows and the seconds of at least one step, all of "
                f"them positive. Received: {self}."
            )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return to_object(self)

    @classmethod
    def from_json(cls, value: Any) -> Profile:
        """Return the profile in a JSON value.

        Raises:
            ValueError, TypeError: It's none.
        """
        found: Profile = from_plain(value, cls)
        return found


def messages_of(
    buckets: Sequence[Sequence[int]],
) -> tuple[GradientMessage, ...]:
    """Return the all-reduces of gradients, given the bytes of those in each bucket.

    A bucket is ready when the backward pass has computed it and those before it: passes
    take as long as their gradients are large.
    """
    total = sum(map(sum, buckets)) or 1
    found, known = [], 0
    for bucket in buckets:
        known += sum(bucket)
        found.append(GradientMessage("all_reduce", sum(bucket), known / total))
    return tuple(found)
