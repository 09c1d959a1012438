"""What layers cost at a batch size and a number of micro-batches."""

from __future__ import annotations

import pytest

from kerasdist.placement.partition import LayerCost, ModelCost, Run, TensorCost

LAYER = LayerCost(
    path="a", saved_row_bytes=10.0, saved_bytes=7, transient_row_bytes=4, row_flops=5.0
)


def test_activations_of_all_micro_batches_are_held():
    for parts in (1, 4):
        run = Run(batch_size=100, micro_batches=parts)
        assert LAYER.activation_bytes(run) == 1007
        assert LAYER.transient_bytes(run) == 400 / parts
        assert LAYER.flops(run) == 1500


def test_with_rematerialization_those_of_one():
    run = Run(batch_size=100, micro_batches=4, rematerialize=True)
    assert LAYER.activation_bytes(run) == 257
    assert LAYER.flops(run) == 2000


def test_the_largest_part_counts():
    assert Run(batch_size=10, micro_batches=4).part_rows == 3
    assert Run(batch_size=2, micro_batches=4).part_rows == 1


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
    with pytest.raises(ValueError, match=r"Received twice: \['a'\]"):
        ModelCost(layers=(LAYER, LAYER))
    for tensor in (
        TensorCost(source=1, consumers=(0,), row_bytes=1.0),
        TensorCost(source=0, consumers=(1,), row_bytes=1.0),
    ):
        with pytest.raises(ValueError, match=r"^A tensor must lead from layer"):
            ModelCost(layers=(LAYER,), tensors=(tensor,))
