"""Data that differ between the ranks: detection, decision, and sending by the chief.

The comparison itself is in `comparison`. Data that are the same on all workers are
divided in `strategies.data`.
"""
