import dataclasses
import pickle
import re

import pytest

from chains import chain
from kerasdist.errors import PlanError
from kerasdist.placement.partition import LayerCost, ModelCost, Run, StageCosts
from kerasdist.placement.plan import Device, human_bytes, make_plan, parse_bytes

MB = 10**6


def equal_layers(count: int = 8, **values: float) -> ModelCost:
    """A chain of equal layers: 10 MB of weights each, by default."""
    given = {"parameter_bytes": 10 * MB, "row_flops": 1000.0, **values}
    return chain(
        [LayerCost(path=f"dense_{i}", kind="Dense", **given) for i in range(count)]
    )


def devices(*limits: int | None) -> list[Device]:
    return [
        Device(name=f"GPU:{i}", memory_limit=limit, found="as it was given")
        for i, limit in enumerate(limits)
    ]


def test_the_tables():
    model = equal_layers(
        slot_bytes=20 * MB, gradient_bytes=10 * MB, saved_row_bytes=1000.0
    )
    run = Run(batch_size=1000, micro_batches=4)
    plan = make_plan(model, run, devices(200 * MB, None))
    assert list(plan.placement.values()) == ["GPU:0"] * 4 + ["GPU:1"] * 4
    lines = str(plan).splitlines()
    assert lines[0] == "Layers, for a batch of 1000 rows in 4 micro-batches:"
    (row,) = [line for line in lines if line.startswith("dense_7")]
    assert " | ".join(re.split(r"  +", row)) == (
        "dense_7 | Dense | 10 MB | 30 MB | 1 MB | 3 M | GPU:1"
    )
    # Of each layer 1 MB is held for all parts, or 0.25 MB for one.
    run = dataclasses.replace(run, rematerialize=True)
    again = make_plan(equal_layers(4, saved_row_bytes=1000.0), run, devices(100 * MB))
    assert str(again).endswith("\nComputing activations again saves 3 MB on GPU:0.")
    (total,) = [line for line in lines if line.startswith("all layers")]
    assert re.split(r"  +", total)[1:] == ["80 MB", "240 MB", "8 MB", "24 M"]
    (first,) = [line for line in lines if line.startswith("GPU:0")]
    assert " | ".join(re.split(r"  +", first)) == (
        "GPU:0 | 4 | 40 MB | 120 MB | 4 MB | 0 B | 161 MB | 200 MB | 80 % | 50 %"
    )
    assert lines[-2:] == ["  GPU:0: as it was given", "  GPU:1: as it was given"]
    assert all(line == line.rstrip() for line in lines)


def test_a_smaller_batch_more_micro_batches_and_rematerialization():
    model = equal_layers(
        parameter_bytes=MB, saved_row_bytes=0.1 * MB, transient_row_bytes=0.2 * MB
    )
    run, limits = Run(batch_size=100), [100 * MB]
    with pytest.raises(PlanError) as caught:
        make_plan(model, run, devices(*limits))
    found = {}
    for line in caught.value.advice:
        for name, number in re.findall(r"(batch_size|micro_batches)=(\d+)", line):
            found[name] = int(number)

    def fits(**changes: int) -> bool:
        changed = dataclasses.replace(run, **changes)
        return StageCosts(model, changed).best(limits) is not None

    assert fits(batch_size=found["batch_size"])
    assert not fits(batch_size=found["batch_size"] + 1)
    assert fits(micro_batches=found["micro_batches"])
    assert not fits(micro_batches=found["micro_batches"] - 1)
    again = "rematerialize=True with micro_batches=2 (at least)"
    assert again in caught.value.advice


def whole(*megabytes: float, **values: float) -> ModelCost:
    layers = [
        LayerCost(path=f"layer_{i}", parameter_bytes=n * MB, row_flops=1.0, **values)
        for i, n in enumerate(megabytes)
    ]
    return chain(layers)


@pytest.mark.parametrize(
    ("model", "rows", "limits", "advice"),
    [
        (
            *(whole(80, 10), 1, (20, 80)),
            (
                "the devices in another order, with 80 MB, 20 MB",
                "1 more device with 80 MB (3 in all)",
            ),
        ),
        (
            *(whole(80), 1, (20, 20)),
            (
                "nothing while layer 'layer_0' is whole: its weights, gradients and "
                "slots alone are 80 MB, the largest device has 20 MB. Divide it over "
                "several devices (`kerasdist.layers.ShardedDense`, `ShardedEmbedding`)",
            ),
        ),
        (
            dataclasses.replace(whole(*[0] * 64, saved_row_bytes=MB), tensors=()),
            *(4096, (2,)),
            ("32 devices, rematerialize=True and batch_size=1 (at most)",),
        ),
        (equal_layers(), 4, (25, 25), ("2 more devices with 25 MB (4 in all)",)),
        (whole(1, saved_row_bytes=MB), 1, (1,), ()),
    ],
    ids=["another order", "a layer is too large", "two changes", "devices", "nothing"],
)
def test_what_would_help(model, rows, limits, advice):
    said = "The model doesn't fit" if advice else "nothing that was tried"
    with pytest.raises(PlanError, match=said) as caught:
        make_plan(model, Run(batch_size=rows), devices(*(n * MB for n in limits)))
    assert caught.value.advice == advice
    assert not caught.value.plan.fits
    assert "too much" in str(caught.value)
    assert all(f"  - {line}" in str(caught.value) for line in advice)


def test_an_error_can_be_sent_to_another_process():
    with pytest.raises(ValueError, match=r"^A plan needs a device\."):
        make_plan(equal_layers(), Run(batch_size=1), [])
    with pytest.raises(PlanError) as caught:
        make_plan(equal_layers(), Run(batch_size=4), devices(25 * MB))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value)
    assert copied.advice == caught.value.advice


def test_sizes_are_read_and_written():
    sizes = {"16 GiB": 16 * 2**30, "512mb": 512 * 10**6, "1.5G": 15 * 10**8, "1e9": 1e9}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    written = [human_bytes(n) for n in (999, 1000, 999_999, 1.5e9, float("inf"))]
    assert written == ["999 B", "1 KB", "1 MB", "1.5 GB", "not limited"]


@pytest.mark.parametrize("text", ["", "GB", "-1", "1.2.3", "16XB", "1iB", "0", "1e99"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"^A size must be a number of bytes\."):
        parse_bytes(text)
