"""The state of a running `fit`, with which another process continues it.

What the members of a job give a worker that joins, or write for the next start.
"""
