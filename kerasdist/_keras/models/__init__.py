"""Models built outside of a scope, by their own steps, or trained by custom loops.

Variables that the strategy adopts are in `_keras.training.adoption`.
"""
