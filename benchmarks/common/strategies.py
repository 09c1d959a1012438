"""The strategies that are compared, by name: `ring`, `sync`, `s=4`, `free`, `plain`."""

from __future__ import annotations

from typing import Any

__all__ = ["is_async", "make_strategy", "servers"]


def is_async(name: str) -> bool:
    """Whether each worker takes batches of its own, instead of its part of all."""
    return name == "free" or name.startswith("s=")


def servers(name: str) -> int:
    """How many parameter servers its job has."""
    return 1 if name == "sync" or is_async(name) else 0


def make_strategy(name: str) -> Any:
    """The strategy, or None for `plain`. A server doesn't come back from here."""
    import kerasdist

    if name == "plain":
        return None
    if name == "ring":
        return kerasdist.RingStrategy()
    if name == "sync":
        return kerasdist.ParameterServerStrategy(mode="sync")
    bound = None if name == "free" else int(name.removeprefix("s="))
    return kerasdist.ParameterServerStrategy(mode="async", max_staleness=bound)
