"""Tables of arrays that a server holds, their clocks, and their snapshots."""
