"""Tables of arrays that a server holds, their clocks, and their snapshots.

Nothing here knows of connections: a table is called by `ps.server`.
"""
