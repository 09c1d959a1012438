"""A worker's side of parameter servers: connections, remote tables, a communicator."""
