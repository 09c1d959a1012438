"""A worker's side of parameter servers: connections, remote tables, a communicator.

It handles servers in this process (`connect`) and remote ones (`network`) alike.
"""
