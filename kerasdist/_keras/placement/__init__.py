"""Layers on devices as Keras calls them, micro-batches, and rematerialization."""
