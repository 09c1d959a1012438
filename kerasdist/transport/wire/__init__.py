"""The wire format: frames, control messages, the handshake and its secret.

Formats and their checks only: nothing here waits for a peer or opens a socket.
"""
