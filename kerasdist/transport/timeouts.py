"""The time limits of a job's phases."""

from __future__ import annotations

import dataclasses

# 31 years. The system's calls accept no much longer times.
_MOST_SECONDS = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds that each phase may take. All finite: nothing waits for ever.

    Attributes:
        startup: Until all workers of the job are connected. Machines of a
            cluster start minutes apart, so this is generous.
        collective: Until all ranks have joined one collective and it is done.
            It bounds how far workers may drift apart, e.g. while one of them
            saves a checkpoint. A dead or frozen worker is noticed much earlier.
        heartbeat: Silence after which a worker counts as lost. Heartbeats are
            sent by a thread of their own, several times in this span.
    """

    startup: float = 300.0
    collective: float = 600.0
    heartbeat: float = 30.0

    def __post_init__(self) -> None:
        faults = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), bool)
            or not isinstance(value, (int, float))
            or not 0 < value <= _MOST_SECONDS
        ]
        if faults:
            raise ValueError(
                "Timeouts must be finite numbers of seconds above 0, at most 1e9. "
                f"Received: {', '.join(faults)}. Nothing may wait for ever: to wait "
                "long, pass a large number."
            )

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two heartbeats: four may be lost before the time-out.

        They also report the collective that each rank is in, so at least four fit into
        the time of one collective: the late ranks are known when the time is over.
        """
        return min(self.heartbeat / 5.0, self.collective / 4.0)
