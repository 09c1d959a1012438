"""Files that Keras writes, on several workers: the chief writes, others wait.

The callbacks' other agreements are in `_keras.training.callbacks`.
"""
