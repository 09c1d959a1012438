"""Layers on devices in Keras's calls, micro-batches, and rematerialization.

The devices themselves are chosen in `strategies.placed`.
"""
