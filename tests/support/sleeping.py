"""Layers that sleep in a graph, for scripts of workers: put it in front of them.

A script imports `time`, `tf` and `layers` of Keras before.
"""

from __future__ import annotations

SLEEPING = """
def sleep(seconds, tensor, stateful=False):
    def call(value):
        time.sleep(seconds)
        return value
    # By default those of a step run one after the other.
    late = tf.numpy_function(call, [tensor], tensor.dtype, stateful=stateful)
    return tf.ensure_shape(late, tensor.shape)

class Slow(layers.Layer):
    def __init__(self, forward, backward, **kwargs):
        super().__init__(**kwargs)
        self.forward, self.backward = forward, backward

    def call(self, inputs):
        @tf.custom_gradient
        def slow(value):
            return sleep(self.forward, value), lambda g: sleep(self.backward, g)
        return slow(inputs)
"""
