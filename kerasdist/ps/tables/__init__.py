"""Tables of arrays that a server holds, their clocks, and their snapshots.

Nothing here depends on connections: a table is called by `ps.server`.
"""
