"""Steps that XLA compiles in parts, between which workers communicate.

What is compiled as a whole is no matter of this room.
"""
