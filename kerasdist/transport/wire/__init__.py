"""What is on a connection: frames, messages, the handshake and its secret."""
