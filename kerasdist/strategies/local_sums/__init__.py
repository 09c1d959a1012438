"""Sums over the replicas of one worker on their devices: by NCCL on GPUs.

Here: TensorFlow's collectives inside of one process, without any server, and the
choice between them and host memory. Not here: collectives between workers, see
`strategies.native` for those of TensorFlow.
"""
