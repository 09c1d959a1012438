"""A parameter server: its workers, their requests, and their collectives.

The arrays themselves are in `parameter_server.tables`.
"""
