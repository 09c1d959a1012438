"""Learning rate, step count and updates of Keras's optimizers."""
