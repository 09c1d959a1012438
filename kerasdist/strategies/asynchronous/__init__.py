"""Workers that don't wait for each other: weights, batches, membership.

`ParameterServerStrategy(mode="async")` and what it does in Keras's place. The servers
are in `kerasdist.ps`.
"""
