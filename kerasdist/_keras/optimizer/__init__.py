"""Learning rate, step count and updates of Keras's optimizers.

Where gradients are reduced before an update is `_keras.training.optimizers`.
"""
