"""Data that differ between the workers: comparing them, and using the chief's."""
