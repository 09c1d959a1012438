"""Measurement of the times of steps and their parts, and of the bytes sent.

`kerasdist.callbacks.scaling_board` explains and draws them.
"""
