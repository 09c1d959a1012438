"""Data parallel over workers, each worker's model over its own devices.

That the numbers are those of one process is a part of `test_equivalence`.
"""

import textwrap

import pytest
from devices import CLASSIFIER, begin

from workers import Workers

PRELUDE = begin(2) + CLASSIFIER
PRELUDE += """
def build():
    keras.utils.set_random_seed(1)
    return compiled(keras.Sequential([
        keras.layers.Dense(16, activation="relu", name="encoder"),
        keras.layers.LayerNormalization(name="norm"),
        keras.layers.Dense(3, name="decoder"),
    ]))

def devices_of(model):
    return {
        variable.path: variable.value.device[-5:]
        for variable in [*model.variables, *model.optimizer.variables]
    }
"""


def script(text):
    return PRELUDE + textwrap.dedent(text)


@pytest.mark.soak
def test_workers_may_be_placed_differently_and_files_have_no_devices(tmp_path):
    """Operations, too: the report is made of TensorFlow's own metadata."""
    text = """
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = kerasdist.RingStrategy(
        placement={} if rank else {"encoder": "CPU:1", "norm": "CPU:1"},
        devices=["CPU:0", "CPU:1"],
        rematerialize=rank == 1,
    )
    calls, plain_call = [0], keras.layers.LayerNormalization.call
    def call(self, inputs):
        calls[0] += 1
        return plain_call(self, inputs)
    keras.layers.LayerNormalization.call = call
    with strategy.scope():
        if rank:
            with strategy.stage("CPU:1"):
                model = build()
        else:
            model = build()
    found = numbers(model)
    path = os.path.join(sys.argv[1], "model.keras")
    model.save(path)
    digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()
    ran = [
        [place.layer, place.device[-5:], place.forward > 0, place.backward > 0]
        for place in strategy.placement_report().steps["train"].layers
    ]
    print("RESULT", json.dumps([digest, devices_of(model), calls[0], ran]))
    if rank == 0:
        strategy.close()
        loaded = keras.models.load_model(path)
        plain = numbers(build())
        for mine, theirs in zip(found, plain, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
        print("RESULT", json.dumps(bool(np.allclose(
            loaded.predict(x, verbose=0), found[PREDICTED], rtol=1e-5, atol=1e-6
        ))))
    """
    first, second = Workers(script(text), 2, args=[str(tmp_path)]).run()
    (digest, devices, calls, ran), loads = first.results
    assert loads
    second_digest, other, more_calls, all_ran = second.result
    assert second_digest == digest
    # One of them computes activations again.
    assert more_calls > calls > 0
    for variables, places, decoder in (
        (devices, ran, "CPU:0"),
        (other, all_ran, "CPU:1"),
    ):
        for name, expected in {"encoder": "CPU:1", "decoder": decoder}.items():
            there = {place for path, place in variables.items() if name in path}
            assert there == {expected}, name
            (found,) = [p[1:] for p in places if f"/{name}" in p[0]]
            assert found == [expected, True, True]


def test_what_it_refuses_and_a_plan():
    text = """
    ring = kerasdist.RingStrategy
    placed = ring(placement={"nothing": "CPU:1"})
    with placed.scope():
        model = build()
    plan = kerasdist.plan(build, ["CPU:1", "CPU:0"], batch_size=16, inputs=(8,))
    planned = ring(placement=plan)
    with planned.scope():
        other = build()
    numbers(other)
    result([
        message(ring, placement="auto"),
        message(ring, placement={"a": "CPU:1"}, transport="native"),
        message(ring, micro_batches=2),
        message(ring, rematerialize=True),
        message(ring().stage, "CPU:0"),
        message(model.fit, x, y, verbose=0),
    ])
    result([plan.placement, devices_of(other)])
    """
    (alone,) = Workers(script(text), 1, env={"TF_CONFIG": None}, handover=False).run()
    found, (plan, devices) = alone.results
    assert len(plan) == 3
    assert "CPU:1" in plan.values()
    for path, device in plan.items():
        kernels = [name for name in devices if f"/{path.split('/')[-1]}/" in name]
        assert kernels
        assert {devices[name] for name in kernels} == {device}
    texts = [
        "ValueError: RingStrategy doesn't plan. Received: placement='auto'.",
        "ValueError: TensorFlow's own collectives take gradients from one",
        "ValueError: Micro-batches keep the stages of a placement busy.",
        "ValueError: Rematerialization recomputes the stages of a placement.",
        "ValueError: Stages are a part of a placement.",
        "ValueError: Patterns of the placement match no layer.",
    ]
    for said, text in zip(found, texts, strict=True):
        assert said.startswith(text)
