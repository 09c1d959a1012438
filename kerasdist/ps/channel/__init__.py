"""Requests and replies between a client and a server, in a process or by socket."""
