import pytest

from kerasdist.placement.partition import LayerCost, ModelCost, Run

LAYER = LayerCost(
    path="a", saved_row_bytes=10.0, saved_bytes=7, transient_row_bytes=4, row_flops=5.0
)


@pytest.mark.parametrize(
    ("parts", "again", "held", "transient", "flops"),
    [
        (1, False, 1007, 400, 1500),
        # Activations of all micro-batches are held; if computed again, those of one.
        (4, False, 1007, 100, 1500),
        (4, True, 257, 100, 2000),
    ],
)
def test_what_a_layer_costs(parts, again, held, transient, flops):
    run = Run(batch_size=100, micro_batches=parts, rematerialize=again)
    assert LAYER.activation_bytes(run) == held
    assert LAYER.transient_bytes(run) == transient
    assert LAYER.flops(run) == flops
    assert Run(batch_size=10, micro_batches=4).part_rows == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": 1.5, "micro_batches": 0}, "batch_size=1.5, micro_batches=0"),
    ],
)
def test_wrong_numbers(given, said):
    with pytest.raises(ValueError, match=f"Received: {said}; expected integers >= 1"):
        Run(**given)


def test_wrong_models():
    with pytest.raises(ValueError, match=r"^The model has no layers\."):
        ModelCost(layers=())
