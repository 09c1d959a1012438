import numpy as np
import pytest

from groups import Group
from kerasdist.transport.tracing import NAMES, now

KINDS = [("unix", 2), ("shared", 3), ("servers_tcp", 2), ("abb", 3), ("single", 1)]


class Notes:
    def __init__(self):
        self.spans = []

    def add(self, name, begin, end, size=0, what=""):
        self.spans.append((name, begin, end, size, str(what)))

    def of(self, name):
        return [span for span in self.spans if span[0] == name]


@pytest.mark.parametrize(("kind", "size"), KINDS, ids=lambda value: str(value))
@pytest.mark.parametrize("elements", [100, 300_000])
def test_an_all_reduce_is_recorded_with_what_it_is_made_of(kind, size, elements):
    def work(communicator):
        buffer = np.ones(elements, np.float32)
        communicator.all_reduce([buffer])
        notes, others = Notes(), Notes()
        communicator.add_recorder(notes)
        communicator.add_recorder(others)
        begin = now()
        communicator.all_reduce([buffer])
        end = now()
        communicator.remove_recorder(notes)
        communicator.all_reduce([buffer])
        communicator.remove_recorder(others)
        assert len(others.of("all_reduce")) == 2
        return notes, begin, end

    with Group(kind, size) as group:
        for notes, begin, end in group.run(work):
            ((_, first, last, octets, what),) = notes.of("all_reduce")
            assert begin <= first <= last <= end
            assert octets == 4 * elements
            assert "all_reduce(op='sum', dtype=float32" in what
            inside = [span for span in notes.spans if span[0] in NAMES]
            assert all(first <= b <= e <= last for _, b, e, _, _ in inside)
            if size > 1:
                assert {"pack", "wait"} <= {span[0] for span in inside}
                reducing = not kind.startswith("server")
                assert ("reduce" in {span[0] for span in inside}) is reducing
            # What doesn't overlap: one after the other, in less than all the time.
            follow = [s for s in inside if s[0] != "send" and "server" not in s[4]]
            assert sum(e - b for _, b, e, _, _ in follow) <= last - first
