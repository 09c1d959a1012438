"""Graphs of functions: inspection, the devices they ran on, and edges added to them.

Hooks in TensorFlow are not here but in the modules that `_tf.patches` names.
"""
