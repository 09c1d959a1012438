"""The costs of a model's layers: bytes, operations, activations, without weights.

`kerasdist.placement` works on with these numbers.
"""
