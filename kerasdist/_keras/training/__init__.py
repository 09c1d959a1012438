"""Training with Keras's trainer: optimizers, losses, steps, loops, logs, callbacks.

Hooks of the table in `_keras.patches`. They decide when something is done; how several
workers do it is the strategy's, behind `_keras.protocols`.
"""
