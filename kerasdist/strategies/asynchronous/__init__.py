"""Asynchronous workers: weights, batches, membership.

They are `ParameterServerStrategy(mode="async")` and its hooks in Keras. The servers
are in `kerasdist.parameter_server`.
"""
