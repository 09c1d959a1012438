"""Graphs of functions: what is in them, where it runs, and edges added to them.

What is patched in TensorFlow is not here but in `_tf.patches`.
"""
