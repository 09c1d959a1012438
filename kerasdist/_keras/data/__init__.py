"""Data in the forms in which Keras iterates over them: arrays, PyDatasets, generators.

Their division among workers is in `strategies.data`.
"""
