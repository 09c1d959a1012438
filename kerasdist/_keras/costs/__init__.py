"""What a model's layers cost: bytes, operations, activations, found without weights.

From here on they are numbers, in `kerasdist.placement`.
"""
