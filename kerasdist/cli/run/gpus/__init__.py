"""`kerasdist run --gpus`: each worker gets its share of its host's GPUs.

Here: the GPUs of a host without TensorFlow, their division among its workers, and the
variable by which CUDA knows it. Not here: the devices of a strategy, which finds those
of its process.
"""
