"""Data as Keras takes and iterates over them: arrays, PyDatasets, generators.

How they are divided over workers is in `strategies.data`.
"""
