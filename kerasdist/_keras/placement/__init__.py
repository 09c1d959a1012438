"""Layers on devices as Keras calls them, micro-batches, and rematerialization.

The devices themselves are chosen in `strategies.placed`.
"""
