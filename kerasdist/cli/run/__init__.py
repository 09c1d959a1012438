"""`kerasdist run`: starts a job's processes, watches them, and reports how they ended.

It communicates with the processes by pipes and signals only, and imports neither
TensorFlow nor Keras.
"""
