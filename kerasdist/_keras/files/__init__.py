"""Files that Keras writes, on several workers: the chief writes, others wait.

What callbacks agree on is in `_keras.training.callbacks`.
"""
