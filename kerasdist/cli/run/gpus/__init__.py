"""`kerasdist run --gpus`: each worker gets its share of its host's GPUs.

Here: the GPUs of a host without TensorFlow, their division among its workers, and the
variable that says so to CUDA. Not here: the devices of a strategy, which are those
that its process sees.
"""
