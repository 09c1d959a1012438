"""Runs TensorFlow's own tests of strategies, for `test_tensorflow_own.py`.

TensorFlow ships base classes (`tensorflow.python.distribute.strategy_test_lib`)
whose `_test_*` methods take a strategy; TensorFlow's tests of each strategy call
them. Here they are called for MirroredStrategy and for RingStrategy, and tests of
our own beside them. Arguments: names of classes below. Prints

    RESULT {"<case>": {"MirroredStrategy": <outcome>, "RingStrategy": <outcome>}}

where an outcome is "passed", "skipped", or the traceback.
"""

import inspect
import json
import os
import sys
import unittest

import pytest
import tensorflow as tf
from tensorflow.python.distribute import strategy_test_lib
from tensorflow.python.eager import context

import kerasdist

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
_DEVICES = ["CPU:0", "CPU:1"]
_PAIRS = [[i, i + 1] for i in range(0, 10, 2)]
constant, replica_context = tf.constant, tf.distribute.get_replica_context
# Methods that aren't called, with the reason.
ELSEWHERE = {
    "_test_device_and_input_device_are_colocated": "sessions on a cluster of its own",
    "_test_device_and_input_device_are_colocated_with_function": "likewise",
}
# Methods that choose their mode themselves, or that have none in a graph.
EAGER = {
    "_test_minimize_loss_eager": "it reads values at once",
    "_test_minimize_loss_graph": "it makes a graph itself",
    "_test_dataset_from_function": "TensorFlow 2's datasets aren't for sessions",
}


class TwoDevices(
    strategy_test_lib.DistributionTestBase,
    strategy_test_lib.TwoDeviceDistributionTestBase,
):
    devices = _DEVICES

    # These need more than a strategy: TensorFlow's tests give it so.

    def _test_minimize_loss_graph(self, d):
        # A session of one CPU, where the second device must be allowed to be.
        super()._test_minimize_loss_graph(d, soft_placement=True)

    def _test_dataset_from_function(self, strategy):
        self._test_input_fn_iterable(strategy, self._input_fn(), _PAIRS)

    def _test_input_fn_iterator_with_dataset(self, strategy):
        iterator = strategy.make_input_fn_iterator(self._input_fn())
        devices = strategy.extended.worker_devices
        self._test_input_fn_iterator(iterator, devices, _PAIRS)

    def _input_fn(self):
        return self._input_fn_to_test_input_context(
            lambda: tf.data.Dataset.range(10),
            expected_num_replicas_in_sync=2,
            expected_num_input_pipelines=1,
            expected_input_pipeline_id=0,
        )


class Contract(tf.test.TestCase):
    """What `tf.distribute`'s documentation says of two replicas, in our words."""

    devices = _DEVICES

    def _run(self, strategy, fn, *args, graph):
        """What each replica's `fn` returns, as numpy arrays per replica."""

        def replicas():
            return strategy.run(fn, args=args)

        made = (tf.function(replicas) if graph else replicas)()
        local = tf.nest.map_structure(strategy.experimental_local_results, made)
        return self.evaluate(local)

    def _differing(self, strategy, *values):
        return strategy.experimental_distribute_values_from_function(
            lambda ctx: values[ctx.replica_id_in_sync_group]
        )

    def _test_all_reduce_of_slices(self, strategy, run_in_function=False):
        def replica():
            ctx = tf.distribute.get_replica_context()
            number = ctx.replica_id_in_sync_group
            mine = tf.IndexedSlices(
                tf.fill([2, 3], tf.cast(number, tf.float32) + 1),
                tf.stack([0, number + 1]),
                tf.constant([4, 3]),
            )
            total = ctx.all_reduce(SUM, mine)
            mean = ctx.all_reduce(MEAN, mine)
            assert isinstance(total, tf.IndexedSlices)
            assert isinstance(mean, tf.IndexedSlices)
            return tf.convert_to_tensor(total), tf.convert_to_tensor(mean)

        total, mean = self._run(strategy, replica, graph=run_in_function)
        expected = [[[3] * 3, [1] * 3, [2] * 3, [0] * 3]] * 2
        self.assertAllEqual(total, expected)
        self.assertAllEqual(mean, tf.constant(expected) / 2)

    def _test_reduce_to_of_slices(self, strategy):
        value = self._differing(
            strategy,
            tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2])),
            tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 2]), tf.constant([3, 2])),
        )
        with strategy.scope():
            variable = tf.Variable(tf.zeros([3, 2]))
        for reduced in (
            strategy.extended.reduce_to(SUM, value, variable),
            *strategy.extended.batch_reduce_to(SUM, [(value, variable)]),
        ):
            for local in strategy.experimental_local_results(reduced):
                assert isinstance(local, tf.IndexedSlices)
                found = tf.convert_to_tensor(local)
                self.assertAllEqual(found, [[0, 0], [2, 2], [1, 1]])

    def _test_gradient_of_all_gather(self, strategy, run_in_function=False):
        def replica(x):
            ctx = tf.distribute.get_replica_context()
            with tf.GradientTape() as tape:
                tape.watch(x)
                gathered = ctx.all_gather(x, axis=0)
                weight = tf.range(1.0, 5.0) * tf.cast(
                    ctx.replica_id_in_sync_group + 1, tf.float32
                )
                loss = tf.reduce_sum(gathered * weight)
            return gathered, tape.gradient(loss, x)

        value = self._differing(strategy, constant([1.0, 2.0]), constant([3.0, 4.0]))
        gathered, gradient = self._run(strategy, replica, value, graph=run_in_function)
        self.assertAllEqual(gathered, [[1, 2, 3, 4]] * 2)
        self.assertAllEqual(gradient, [[3, 6], [9, 12]])

    def _test_all_gather_of_other_lengths(self, strategy, run_in_function=False):
        def replica(x):
            return tf.distribute.get_replica_context().all_gather(x, axis=1)

        one, other = constant([[1], [2]]), constant([[3, 4], [5, 6]])
        value = self._differing(strategy, one, other)
        gathered = self._run(strategy, replica, value, graph=run_in_function)
        self.assertAllEqual(gathered, [[[1, 3, 4], [2, 5, 6]]] * 2)

    def _test_gather(self, strategy, run_in_function=False):
        one, other = constant([[1, 2]]), constant([[3, 4], [5, 6]])
        value = self._differing(strategy, one, other)

        def gather():
            return strategy.gather(value, axis=0)

        gathered = (tf.function(gather) if run_in_function else gather)()
        self.assertAllEqual(gathered, [[1, 2], [3, 4], [5, 6]])

    def _test_gather_of_strings(self, strategy):
        value = self._differing(strategy, tf.constant(["a"]), tf.constant(["b", "c"]))
        self.assertAllEqual(strategy.gather(value, axis=0), [b"a", b"b", b"c"])

    def _test_reduce_over_an_axis(self, strategy, run_in_function=False):
        value = self._differing(strategy, tf.constant([2.0, 4.0]), tf.constant([6.0]))

        def reduce():
            return [strategy.reduce(op, value, axis=0) for op in (SUM, MEAN)]

        total, mean = (tf.function(reduce) if run_in_function else reduce)()
        self.assertAllEqual([total, mean], [12, 4])

    def _test_reduce_over_an_axis_without_rows(self, strategy):
        value = self._differing(strategy, tf.constant([2.0, 4.0]), tf.zeros([0]))
        self.assertAllEqual(strategy.reduce(SUM, value, axis=0), 6)
        self.assertAllEqual(strategy.reduce(MEAN, value, axis=0), 3)

    def _test_reduce_of_integers(self, strategy):
        value = self._differing(strategy, tf.constant([1, 2]), tf.constant([3]))
        total = strategy.reduce("SUM", value, axis=0)
        assert total.dtype == tf.int32
        self.assertAllEqual(total, 6)

    def _test_reduce_of_a_mirrored_value(self, strategy):
        with strategy.scope():
            variable = tf.Variable(3.0)
        self.assertAllEqual(strategy.reduce(MEAN, variable, axis=None), 3)
        self.assertAllEqual(strategy.reduce(MEAN, tf.constant(3.0), axis=None), 3)
        with pytest.raises(ValueError, match="non-DistributedValues"):
            strategy.reduce(SUM, tf.constant(3.0), axis=None)

    def _test_batches_in_a_function(self, strategy):
        data = strategy.experimental_distribute_dataset(
            tf.data.Dataset.range(8).batch(2)
        )

        @tf.function
        def epoch(batches):
            total = tf.constant(0, tf.int64)
            for batch in batches:
                total += strategy.reduce(SUM, strategy.run(tf.square, (batch,)), axis=0)
            return total

        self.assertAllEqual(epoch(data), sum(i * i for i in range(8)))
        self.assertAllEqual(epoch(iter(data)), sum(i * i for i in range(8)))

    def _test_element_spec(self, strategy):
        data = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(tf.zeros([8, 3])).batch(4)
        )
        spec = data.element_spec

        @tf.function(input_signature=[spec])
        def total(batch):
            return strategy.reduce(SUM, strategy.run(tf.shape, (batch,)), axis=None)

        self.assertAllEqual([total(batch) for batch in data], [[4, 6]] * 2)

    def _test_checkpoint(self, strategy):
        path = os.path.join(self.get_temp_dir(), "checkpoint")
        with strategy.scope():
            total = tf.Variable(
                0.0,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            saved = tf.train.Checkpoint(a=tf.Variable([1.0, 2.0]), b=total)
        strategy.run(lambda: saved.b.assign_add(2.0))
        written = saved.write(path)
        plain = tf.train.Checkpoint(a=tf.Variable([0.0, 0.0]), b=tf.Variable(0.0))
        plain.read(written).assert_consumed()
        self.assertAllEqual(plain.a, [1, 2])
        self.assertAllEqual(plain.b, 4)
        with strategy.scope():
            again = tf.train.Checkpoint(a=tf.Variable([0.0, 0.0]))
            again.read(written).expect_partial()
        for local in strategy.experimental_local_results(again.a):
            self.assertAllEqual(local, [1, 2])


class OneObject(tf.test.TestCase):
    """A tensor from outside the step is one object on all replicas.

    MirroredStrategy counts it once: a sum of two replicas' ones is one.
    """

    devices = _DEVICES

    def _test_all_reduce(self, strategy, run_in_function=False):
        one = tf.constant(1.0)

        def step():
            ctx = tf.distribute.get_replica_context()
            return [ctx.all_reduce(op, one) for op in (SUM, MEAN)]

        step = tf.function(step) if run_in_function else step
        total, mean = strategy.run(step)
        self.assertAllEqual(strategy.experimental_local_results(total), [2, 2])
        self.assertAllEqual(strategy.experimental_local_results(mean), [1, 1])

    def _test_all_reduce_of_slices(self, strategy):
        one = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), tf.constant([1, 1]))

        def replica():
            ctx = tf.distribute.get_replica_context()
            return tf.convert_to_tensor(ctx.all_reduce(SUM, one))

        made = strategy.experimental_local_results(strategy.run(replica))
        self.assertAllEqual(made, [[[2]]] * 2)

    def _test_all_gather(self, strategy):
        one = tf.constant([1.0])
        made = strategy.run(lambda: replica_context().all_gather(one, axis=0))
        self.assertAllEqual(strategy.experimental_local_results(made), [[1, 1]] * 2)


class OneDevice(
    strategy_test_lib.DistributionTestBase,
    strategy_test_lib.OneDeviceDistributionTestBase,
):
    devices = _DEVICES[:1]


def cases():
    """All of (base class, whether in a graph, name of the method, its arguments)."""
    for base in map(globals().__getitem__, sys.argv[1:]):
        for name, method in inspect.getmembers(base, inspect.isfunction):
            if not name.startswith("_test_") or name in ELSEWHERE:
                continue
            _, *parameters = inspect.signature(method).parameters.values()
            required = [p.name for p in parameters if p.default is p.empty]
            if len(required) != 1 or required[0] not in ("strategy", "d", "dist"):
                continue  # it is called by others
            yield base, False, name, {}
            if any(p.name == "run_in_function" for p in parameters):
                yield base, False, name, {"run_in_function": True}
            if base in (TwoDevices, OneDevice) and name not in EAGER:
                yield base, True, name, {}


def start():
    """Begin with two CPUs and nothing else, as in a new process."""
    context._reset_context()
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in _DEVICES]
    )


def outcome(base, graph, name, arguments, strategy_class):
    class Case(base):
        def runTest(self):
            strategy = strategy_class(self.devices)
            try:
                getattr(self, name)(strategy, **arguments)
            finally:
                if hasattr(strategy, "close"):
                    strategy.close()

    result = unittest.TestResult()
    if graph:
        with context.graph_mode(), tf.Graph().as_default():
            Case().run(result)
    else:
        Case().run(result)
    if failed := result.errors + result.failures:
        start()  # a failed collective leaves MirroredStrategy's next ones failing
        return failed[0][1]
    return "skipped" if result.skipped else "passed"


def main():
    start()
    outcomes = {}
    for base, graph, name, arguments in cases():
        mode = "graph" if graph else "function" if arguments else "eager"
        outcomes[f"{base.__name__}.{name} {mode}"] = {
            strategy.__name__: outcome(base, graph, name, arguments, strategy)
            for strategy in (tf.distribute.MirroredStrategy, kerasdist.RingStrategy)
        }
    print("RESULT", json.dumps(outcomes), flush=True)


if __name__ == "__main__":
    sys.exit(main())
