"""Keras layers that are wider than one device.

    wide = kerasdist.layers.ShardedDense(65536, devices=["GPU:0", "GPU:1"])

They compute and learn what `keras.layers.Dense` and `keras.layers.Embedding` do. Their
files hold whole kernels: a plain layer can read them, and so can one with another
number of shards. To load a saved model that has such a layer, import this module first.
"""

from kerasdist.layers.dense import ShardedDense, ShardedEmbedding

__all__ = ["ShardedDense", "ShardedEmbedding"]
