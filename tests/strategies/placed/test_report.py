from kerasdist._tf.graph_clocks import RunNode
from kerasdist.strategies.placed.report import Move, Names, PlacementReport, places_of


def node(name, op="MatMul", device="D0", **more):
    facts = {"inputs": (), "target": None, "item_size": 0, "output": 0, "shapes": ()}
    return RunNode(name=name, op=op, device=device, **facts | more)


def send(source, target="D1", **more):
    name = f"{source}/_1"
    return node(name, "_Send", inputs=(source,), target=target, item_size=4, **more)


NAMES = Names(
    layers={"model_1": "model", "model_1/dense_1": "model/dense"},
    shapes={
        "model_1/dense_1/Relu": [(None, 8)],
        "weights": [(3, 5)],
        "many": [(None, 2), (7,)],
        "square": [(None, None)],
    },
    optimizers={"adam"},
)


def test_what_is_sent_is_priced_by_the_shapes_of_the_trace():
    nodes = [
        send("StatefulPartitionedCall/model_1/dense_1/Relu"),
        send("weights", device="D1", target="D0"),
        send("many", output=1),
        send("square"),
        send("nobody knows"),
        send("data", shapes=((None, 3),)),
        send("weights", target=None),  # within one device
        send("GroupCrossDeviceControlEdges_0/x"),
    ]

    found = places_of(nodes, NAMES, rows=10)

    there = {"source": "D0", "target": "D1", "tensors": 5, "unknown": 2}
    back = {"source": "D1", "target": "D0", "tensors": 1, "unknown": 0}
    assert found.moves == (
        Move(fixed=28, per_row=32 + 12, **there),
        Move(fixed=60, per_row=0, **back),
    )
    assert found.bytes_moved == 28 + 440 + 60
    assert places_of(nodes, NAMES, rows=None).bytes_moved is None


def test_it_is_printed_as_a_table():
    step = places_of([node("model_1/dense_1/MatMul"), send("weights")], NAMES, rows=2)

    assert str(PlacementReport(steps={"train": step})).splitlines() == [
        "train: what ran where",
        "  layer        device    forward  backward",
        "  model/dense  D0              1         0",
        "  D0 -> D1: 60 B for 2 rows per step, in 1 tensors",
    ]
    unknown = places_of([send("model_1/dense_1/Relu")], NAMES, rows=None)
    assert "0 B + 32 B for each row" in str(PlacementReport(steps={"predict": unknown}))
    assert str(PlacementReport(steps={})).startswith("Nothing has run yet")
