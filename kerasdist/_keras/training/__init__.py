"""Training with Keras's trainer: what differs under the strategies."""
