"""The records of all ranks in the format of TensorBoard's trace viewer.

The plugin "profile" of TensorBoard (`tensorboard-plugin-profile`, XProf) reads the
profiler's own files, `<logdir>/plugins/profile/<run>/<name>.xplane.pb`: an `XSpace`
with a plane per process, a line per lane, and the names and attributes of its events
in tables. Of planes that aren't a device's or TensorFlow's own it shows those whose
name begins as `_PREFIX` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kerasdist.callbacks.timeline.trace import Lane, Process, Record, processes

_PREFIX = "/device:CUSTOM:"


def xspace(records: Sequence[Record]) -> bytes:
    """Make the file's contents.

    Args:
        records: Of all ranks.
    """
    # TensorFlow installs it, but it isn't part of TensorFlow's API.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    for process in processes(records):
        _fill(space.planes.add(), process)
    return bytes(space.SerializeToString())


def _fill(plane: Any, process: Process) -> None:
    plane.id = process.rank
    plane.name = _PREFIX + process.title
    events = _Table(plane.event_metadata)
    stats = _Table(plane.stat_metadata)
    for lane in process.lanes:
        _add(plane.lines.add(), lane, events, stats)


def _add(line: Any, lane: Lane, events: _Table, stats: _Table) -> None:
    # Lines are sorted by their numbers.
    line.id = line.display_id = lane.number
    line.name = lane.title
    for begin, end, span in lane.spans:
        event = line.events.add(
            metadata_id=events.number(span.name),
            offset_ps=1000 * begin,
            duration_ps=1000 * (end - begin),
        )
        if span.size:
            event.stats.add(metadata_id=stats.number("bytes"), uint64_value=span.size)
        if span.what:
            event.stats.add(metadata_id=stats.number("what"), str_value=span.what)


class _Table:
    """Names of a plane, each with a number from 1: entries of 0 aren't kept."""

    def __init__(self, entries: Any) -> None:
        self._entries = entries
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of this name."""
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = len(self._numbers) + 1
            self._entries[found].id = found
            self._entries[found].name = name
        return found
