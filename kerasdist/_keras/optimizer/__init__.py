"""Learning rate, step count and updates of Keras's optimizers.

Gradients are reduced before an update, in `_keras.training.optimizers`.
"""
