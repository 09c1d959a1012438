"""A worker's side of parameter servers: connections, remote tables, a communicator.

It speaks to servers in this process (`in_process`) and to others (`network`) alike.
"""
