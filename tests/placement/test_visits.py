"""What each device does of a step without waiting for other devices."""

from __future__ import annotations

import pytest

from kerasdist.placement.micro_batch_order import (
    MicroBatch,
    Operation,
    find_next,
    find_visits,
    union_length,
)


class Graph:
    """Operations in the order in which they are made."""

    def __init__(self):
        self.made = []
        self.marks = {}

    def add(self, device, *inputs, **more):
        self.made.append(Operation(inputs=inputs, device=device, **more))
        return len(self.made) - 1

    def mark(self, part, *inputs, backward=False):
        index = self.add("", *inputs, works=False)
        self.marks[index] = MicroBatch(0, part, backward)
        return index

    @property
    def visits(self):
        return [
            (
                visit.device,
                None if visit.part is None else visit.part.number,
                [(group.after, group.entries) for group in visit.groups],
                visit.exits,
            )
            for visit in find_visits(self.made, self.marks)
        ]


def test_forward_and_back_without_micro_batches():
    g = Graph()
    x = g.add("", before=True)
    a = g.add("A", x)
    b = g.add("A", a)
    c = g.add("B", b)
    loss = g.add("B", c)
    d = g.add("B", loss, c)
    e = g.add("A", d, a)
    f = g.add("A", e)
    update = g.add("B", d)

    assert g.visits == [
        ("A", None, [((x,), (a,))], (b,)),
        ("B", None, [((b,), (c,))], (update,)),
        ("A", None, [((a, d), (e,))], (f,)),
    ]


def test_a_device_has_a_visit_for_each_micro_batch():
    g = Graph()
    x = g.add("", before=True)
    x0, x1 = g.mark(0, x), g.mark(1, x)
    a0 = g.add("A", x0)
    b0 = g.add("B", a0)
    done = g.add("A", a0, orders=True, works=False)
    a1 = g.add("A", x1, done)
    b1 = g.add("B", a1)
    loss = g.add("B", b0, b1)

    assert g.visits == [
        ("A", 0, [((x0,), (a0,))], (a0,)),
        ("B", 0, [((a0,), (b0,))], (b0,)),
        ("A", 1, [((x1, done), (a1,))], (a1,)),
        ("B", 1, [((a1,), (b1,))], (b1,)),
        ("B", None, [((b0, b1), (loss,))], (loss,)),
    ]


def test_a_visit_begins_with_what_takes_some_time_and_ends_with_it():
    g = Graph()
    x = g.add("", before=True)
    shape = g.add("B", x, works=False)
    a = g.add("A", x)
    view = g.add("B", a, works=False)
    b = g.add("B", view, shape)
    c = g.add("B", b)
    g.add("B", c, works=False)
    g.add("C", c, works=False)

    assert g.visits == [
        ("A", None, [((x,), (a,))], (a,)),
        ("B", None, [((shape, view), (b,))], (c,)),
    ]


def test_what_may_begin_at_different_times_is_in_different_groups():
    g = Graph()
    x = g.add("", before=True)
    a = g.add("A", x)
    b = g.add("A", a)
    early, late, also = g.add("B", a), g.add("B", b), g.add("B", b)
    end = g.add("B", early, late, also)

    assert g.visits[1] == ("B", None, [((a,), (early,)), ((b,), (late, also))], (end,))


def test_edges_may_go_back():
    """As those do by which micro-batches are put in order."""
    g = Graph()
    x = g.add("", before=True)
    g.add("A", x, 2)
    a = g.add("A", x)

    assert g.visits == [("A", None, [((0,), (a,))], (1,))]


def test_what_begins_when_a_visit_is_over():
    g = Graph()
    x = g.add("", before=True)
    x0, x1 = g.mark(0, x), g.mark(1, x)
    a0, more = g.add("A", x0), g.add("A", x0)
    b0 = g.add("B", a0)  # it waits for a part of the first visit
    done = g.add("A", a0, more, orders=True, works=False)
    a1 = g.add("A", x1, done)
    b1 = g.add("B", a1)
    g.add("B", b0, b1)

    visits = find_visits(g.made, g.marks)
    assert [(v.device, v.part and v.part.number) for v in visits] == [
        ("A", 0),
        ("B", 0),
        ("A", 1),
        ("B", 1),
        ("B", None),
    ]
    assert find_next(g.made, visits, 9) == [
        [(2, 0), (3, 0), (4, 0)],
        [(4, 0)],
        [(3, 0), (4, 0)],
        [(4, 0)],
        [],
    ]
    assert [len(found) for found in find_next(g.made, visits, 1)] == [1, 1, 1, 1, 0]
    # So many that it would take too long.
    assert not any(find_next(g.made, visits * 101, 9))


@pytest.mark.parametrize(
    ("spans", "length"), [([], 0), ([(1, 2), (4, 6)], 3), ([(4, 6), (1, 5), (2, 3)], 5)]
)
def test_what_overlaps_counts_once(spans, length):
    assert union_length(spans) == length
