"""`kerasdist doctor`: a report of the environment, its faults, and their remedies.

It only inspects: it starts no job and changes nothing.
"""
