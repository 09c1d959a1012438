"""Data that differ between the ranks: found, decided on, and sent by the chief.

The comparison itself is in `comparison`. Data that are the same on all workers go the
way of `strategies.data`.
"""
