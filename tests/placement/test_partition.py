import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import chain
from kerasdist.placement import partition
from kerasdist.placement.partition import LayerCost, ModelCost, Run, StageCosts

PRICE = 3.0


AMOUNTS = {
    **{"parameter_bytes": 100, "slot_bytes": 200, "gradient_bytes": 100},
    **{"update_bytes": 60, "saved_row_bytes": 20, "saved_bytes": 10},
    **{"transient_row_bytes": 20, "output_row_bytes": 20, "row_flops": 50},
}
# Bytes are thousands, and limits lie between them: no cut depends on how one rounds.
UNIT = 1000.0
RUNS = st.builds(
    Run,
    batch_size=st.integers(1, 8),
    micro_batches=st.integers(1, 3),
    rematerialize=st.booleans(),
)


@st.composite
def models(draw: st.DrawFn) -> ModelCost:
    """Chains, and graphs with skips; of a shared layer these go backwards, too."""
    costs = {name: st.integers(1, most) for name, most in AMOUNTS.items()}
    drawn = draw(st.lists(st.fixed_dictionaries(costs), min_size=1, max_size=8))
    layers = tuple(
        LayerCost(path=str(i), **{name: UNIT * n for name, n in each.items()})
        for i, each in enumerate(drawn)
    )
    if draw(st.booleans()):
        return chain(layers)
    last = len(layers) - 1
    consumers = st.lists(st.integers(0, last), min_size=1, max_size=3).map(tuple)
    row_bytes = st.integers(1, 20).map(lambda number: UNIT * number)
    tensors = st.builds(
        partition.TensorCost,
        source=st.integers(-1, last),
        consumers=consumers,
        row_bytes=row_bytes,
    )
    drawn_tensors = draw(st.lists(tensors, max_size=9))
    return ModelCost(layers=layers, tensors=tuple(drawn_tensors))


# What a stage costs, said as plainly as possible.


def plain_stage(model: ModelCost, run: Run, start: int, stop: int):
    """Time, memory and entering bytes of one stage."""
    if start == stop:
        return 0.0, 0.0, 0.0
    mine = model.layers[start:stop]
    inside = range(start, stop)
    entering = leaving = 0.0
    for tensor in model.tensors:
        size = tensor.row_bytes * run.batch_size
        if tensor.source in inside:
            leaving += size * any(i not in inside for i in tensor.consumers)
        else:
            entering += size * any(i in inside for i in tensor.consumers)
    moments = [
        sum(layer.activation_bytes(run) for layer in mine[: i + 1])
        + sum(layer.gradient_bytes for layer in mine[i:])
        + layer.transient_bytes(run)
        for i, layer in enumerate(mine)
    ]
    moments.append(
        sum(layer.gradient_bytes for layer in mine)
        + max(layer.update_bytes for layer in mine)
    )
    held = sum(layer.parameter_bytes + layer.slot_bytes for layer in mine)
    time = sum(layer.flops(run) for layer in mine)
    time += 2 * PRICE * (entering + leaving)
    return time, held + entering + max(moments), entering


def brute_force(model: ModelCost, run: Run, limits) -> tuple[float, float] | None:
    """The slowest stage of the best cut, and the total of all its stages."""
    size, best = len(model.layers), None
    inner = itertools.combinations_with_replacement(range(size + 1), len(limits) - 1)
    for borders in inner:
        ends = (0, *borders, size)
        stages = [plain_stage(model, run, i, j) for i, j in itertools.pairwise(ends)]
        if all(s[1] <= limit for s, limit in zip(stages, limits, strict=True)):
            times = [stage[0] for stage in stages]
            found = (max(times), sum(times))
            best = found if best is None else min(best, found)
    return best


@settings(max_examples=80)
@given(models(), RUNS, st.lists(st.integers(30, 110), min_size=1, max_size=4))
def test_it_is_the_best_of_all_cuts(model, run, percents):
    count = len(model.layers)
    total = plain_stage(model, run, 0, count)[1]
    limits = [total * p // (100 * UNIT) * UNIT + UNIT / 2 for p in percents]
    expected = brute_force(model, run, limits)
    cut = StageCosts(model, run, PRICE).best(limits)
    if expected is None:
        assert cut is None
        return
    assert cut is not None
    assert (cut.slowest, sum(cut.times)) == pytest.approx(expected)
    assert all(a <= b + 1 for a, b in zip(cut.memory, limits, strict=True))
    found = itertools.pairwise(cut.borders)
    stages = [plain_stage(model, run, i, j) for i, j in found]
    assert list(cut.memory) == pytest.approx([stage[1] for stage in stages], abs=1)
    assert cut.borders[0] == 0
    assert cut.borders[-1] == count
