"""Data that are divided again when workers are lost or join in the midst of an epoch.

Each iterable yields `_keras.RepeatableIterator`s, which follow `Workers.layout`.
"""
