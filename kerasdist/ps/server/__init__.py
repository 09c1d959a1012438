"""A parameter server: its workers, their requests, and what they do together.

The arrays themselves are in `ps.tables`.
"""
