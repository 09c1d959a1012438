"""The order of micro-batches on each device, as edges of a graph; and the visits."""

from kerasdist.placement import micro_batch_order
from kerasdist.placement.micro_batch_order import find_next, find_visits


class Graph:
    def __init__(self):
        self.nodes = []
        self.marks = {}

    def add(self, device, *inputs, **more):
        self.nodes.append(
            micro_batch_order.Operation(inputs=inputs, device=device, **more)
        )
        return len(self.nodes) - 1

    def mark(self, part, *inputs, device="", backward=False):
        self.marks[len(self.nodes)] = micro_batch_order.MicroBatch(0, part, backward)
        return self.add(device, *inputs, works=False)

    @property
    def edges(self):
        found = micro_batch_order.find_edges(self.nodes, self.marks)
        return [(edge.device, edge.before, edge.after) for edge in found]


def two_stages(graph, parts, *, by_layer=True, has_effects=False):
    """Two layers on each of A and B; gradients by layer or by micro-batch."""
    forward = []
    for m in range(parts):
        x = graph.mark(m, device="A")
        a = graph.add("A", x)
        b = graph.add("A", a)
        c = graph.add("B", b)
        forward.append([x, a, b, c, graph.add("B", c)])
    loss = graph.add("B", *(way[-1] for way in forward))
    back = [[graph.mark(m, loss, device="B", backward=True)] for m in range(parts)]
    steps = [("B", 4), ("B", 3), ("A", 2), ("A", 1)]
    order = [(m, s) for s in steps for m in range(parts)]
    if not by_layer:
        order = [(m, s) for m in reversed(range(parts)) for s in steps]
    for m, (device, layer) in order:
        node = graph.add(
            device, back[m][-1], forward[m][layer], has_effects=has_effects
        )
        back[m].append(node)
    graph.add("A", *(way[-1] for way in back))  # the gradients' sum
    return forward, back


def test_a_device_finishes_one_micro_batch_before_it_begins_the_next():
    for by_layer in (True, False):
        graph = Graph()
        f, b = two_stages(graph, 3, by_layer=by_layer)

        assert sorted(graph.edges) == sorted(
            [
                ("A", (f[0][2],), (f[1][1],)),
                ("A", (f[1][2],), (f[2][1],)),
                ("B", (f[0][4],), (f[1][3],)),
                ("B", (f[1][4],), (f[2][3],)),
                # Backward the last one first.
                ("B", (b[2][2],), (b[1][1],)),
                ("B", (b[1][2],), (b[0][1],)),
                ("A", (b[2][4],), (b[1][3],)),
                ("A", (b[1][4],), (b[0][3],)),
            ]
        )


def test_what_has_effects_stays_in_the_order_in_which_it_was_made():
    """TensorFlow adds edges of its own between such operations, later."""
    graph = Graph()
    two_stages(graph, 2, has_effects=True)

    assert [after for _, _, after in graph.edges] == [(6,), (8,)]  # forward only


def test_two_ways_over_one_device_are_two_visits():
    """A -> B -> A: the second micro-batch begins when the first has left A."""
    graph = Graph()
    ways = []
    for m in range(2):
        x = graph.mark(m, device="A")
        a = graph.add("A", x)
        b = graph.add("B", a)
        ways.append((x, a, b, graph.add("A", b, a)))
    (_, a0, b0, c0), (_, a1, b1, c1) = ways

    assert graph.edges == [
        ("A", (a0,), (a1,)),
        ("B", (b0,), (b1,)),
        ("A", (c0,), (c1,)),
    ]


def test_edges_that_would_make_a_cycle_are_left_out():
    """A gradient of gradients: of all micro-batches, and then of each once more."""
    graph = Graph()
    f, b = two_stages(graph, 2)
    total = graph.add("A", b[0][-1], b[1][-1])
    again = [graph.mark(m, total, device="A", backward=True) for m in range(2)]
    for m in range(2):
        # On the same visit as the first gradients of B.
        graph.add("B", again[m], f[m][4])
    forward_only = [("A", (f[0][2],), (f[1][1],)), ("B", (f[0][4],), (f[1][3],))]

    found = graph.edges

    assert found[:2] == forward_only
    assert all(max(before) < min(after) for _, before, after in found)


def test_an_operation_without_a_device_is_where_its_input_is():
    graph = Graph()
    ways = []
    for m in range(2):
        x = graph.mark(m)
        a = graph.add("A", x)
        table = graph.add("")  # a variable: of no micro-batch
        ways.append((a, graph.add("", a, table)))

    assert graph.edges == [("A", (ways[0][1],), (ways[1][0],))]


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

    assert visits_of(g) == [
        ("A", None, [((x,), (a,))], (b,)),
        ("B", None, [((b,), (c,))], (update,)),
        ("A", None, [((a, d), (e,))], (f,)),
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

    assert visits_of(g) == [
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

    assert visits_of(g)[1] == (
        "B",
        None,
        [((a,), (early,)), ((b,), (late, also))],
        (end,),
    )


# What each device does of a step without waiting for other devices.


def visits_of(graph):
    return [
        (
            visit.device,
            None if visit.part is None else visit.part.number,
            [(group.after, group.entries) for group in visit.groups],
            visit.exits,
        )
        for visit in find_visits(graph.nodes, graph.marks)
    ]


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

    visits = find_visits(g.nodes, g.marks)
    assert [(v.device, v.part and v.part.number) for v in visits] == [
        ("A", 0),
        ("B", 0),
        ("A", 1),
        ("B", 1),
        ("B", None),
    ]
    assert find_next(g.nodes, visits, 9) == [
        [(2, 0), (3, 0), (4, 0)],
        [(4, 0)],
        [(3, 0), (4, 0)],
        [(4, 0)],
        [],
    ]
    assert [len(found) for found in find_next(g.nodes, visits, 1)] == [1, 1, 1, 1, 0]
    # So many that it would take too long.
    assert not any(find_next(g.nodes, visits * 101, 9))
    # What overlaps counts once.
    assert micro_batch_order.union_length([(4, 6), (1, 5), (2, 3)]) == 5
