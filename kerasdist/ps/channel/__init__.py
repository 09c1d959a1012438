"""Requests and replies between a client and a server, in a process or by socket.

The payloads' meaning is in `ps.server.handler` and `ps.client`.
"""
