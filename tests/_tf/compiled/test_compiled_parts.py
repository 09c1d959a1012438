import pytest
import tensorflow as tf

from kerasdist import _tf
from kerasdist._tf.compiled_step import StepOperation, divide, padded

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def parts(*nodes):
    """Divide nodes: (device or None, those before, collective, those with lists)."""
    names = ("device", "before", "collective", "lists")
    made = [StepOperation(**dict(zip(names, node, strict=False))) for node in nodes]
    return [part.nodes for part in divide(made)]


def test_a_bucket_leaves_before_the_rest_of_the_backward_pass():
    divided = parts(
        ("a", ()),  # the forward pass
        ("a", (0,)),  # the last layer's gradient
        ("a", (1,)),  # the first layer's
        (None, (1,), True),  # the last layer's bucket
        (None, (2, 3), True),  # the first layer's
        ("a", (0,)),  # a metric
        ("a", (3, 4)),  # the update
    )
    assert divided == [(0, 1), (3,), (2,), (4,), (5, 6)]


def test_what_nothing_between_needs_is_compiled_with_what_follows():
    divided = parts(("a", ()), ("a", ()), (None, (1,)), ("a", (0, 2)), ("a", (0,)))
    assert divided == [(1,), (2,), (0, 3, 4)]


def test_lists_stay_in_a_part():
    divided = parts(
        ("a", ()),  # a loop
        ("a", (0,)),  # the last layer's gradient
        ("a", (1,)),  # a layer's between
        ("a", (0, 2), False, (0,)),  # the loop's
        (None, (1,), True),
        (None, (3, 4), True),
        ("a", (4, 5)),
    )
    assert divided == [(0, 1, 2, 3), (4,), (5,), (6,)]
    # What waits for the collective can't be before it.
    divided = parts(("a", ()), (None, (0,), True), ("a", (0, 1), False, (0,)))
    assert divided == [(0,), (1,), (2,)]


def test_devices_are_compiled_apart():
    divided = parts(("a", ()), ("b", ()), ("a", (0, 1)), ("b", (2,)), ("b", (1,)))
    assert divided == [(1,), (0, 2), (3, 4)]


def test_parts_are_compiled_and_keep_effects_and_results():
    sent = []

    def exchange(gradient):
        sent.append(gradient)
        return gradient * 2

    def step(variable, count, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x @ variable) ** 2)
        gradient = tape.gradient(loss, variable)
        with _tf.outside_of_xla():
            reduced = tf.numpy_function(exchange, [gradient], tf.float32)
            reduced.set_shape(gradient.shape)
        count.assign_add(1.0)  # nothing returns it
        variable.assign_sub(0.1 * reduced)
        return {"loss": loss, "none": None}

    x = tf.reshape(tf.range(12.0), (3, 4))
    found = []
    for compiled in (False, True):
        variable, count = tf.Variable(tf.ones((4, 2))), tf.Variable(0.0)

        def run(x, variable=variable, count=count, compiled=compiled):
            if not compiled:
                return step(variable, count, x)
            return _tf.compiled_in_parts(lambda: step(variable, count, x), [CPU])

        function = tf.function(run)
        losses = [function(x) for _ in range(2)]
        assert all(each["none"] is None for each in losses)
        found.append([each["loss"] for each in losses])
        found[-1] += [variable.numpy(), count.numpy()]
    for ours, theirs in zip(*found, strict=True):
        tf.debugging.assert_near(ours, theirs, rtol=1e-5)
    assert count.numpy() == 2
    assert len(sent) == 4
    operations = function.get_concrete_function(x).graph.get_operations()
    calls = [each for each in operations if "Call" in each.type]
    assert len(calls) == 2
    assert all(each.get_attr("_XlaMustCompile") for each in calls)
    kinds = {each.type for each in operations}
    assert "PyFunc" in kinds
    assert not kinds & {"MatMul", "Mul", "AssignSubVariableOp", "AssignAddVariableOp"}


def test_a_function_that_xla_compiles_whole_must_not_communicate():
    @tf.function(jit_compile=True)
    def inner(x):
        return tf.numpy_function(lambda a: a, [x], tf.float32)

    @tf.function
    def step(x):
        return _tf.compiled_in_parts(lambda: inner(x), [CPU])

    with pytest.raises(ValueError, match=r"(?s)communication.*jit_compile=True"):
        step(tf.ones(2))


def test_slices_have_few_different_lengths():
    lengths = set()
    for count in [*range(0, 600, 7), 1023, 9_000, 10_240, 10_241]:
        ones = tf.ones((count, 2))
        more = padded(tf.IndexedSlices(ones, tf.range(count) + 1, tf.constant([0, 2])))
        lengths.add(int(more.indices.shape[0]))
        table = tf.scatter_nd(more.indices[:, None], more.values, (20_000, 2))
        assert float(tf.reduce_sum(table)) == 2 * count
        assert float(tf.reduce_sum(table[0])) == 0
    assert lengths == {*range(64, 577, 64), 640, 1024, 9_216, 10_240, 11_264}
