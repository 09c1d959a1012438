"""Collectives between workers on numpy arrays. No TensorFlow, no Keras.

`connect` makes a job, whose `Communicator` checks, numbers and times each call. The
reductions themselves are in `ring`, `shared_memory` and `mpi`; tensors of TensorFlow's
graphs become arrays in `kerasdist.strategies.reduce.graph_ops`.
"""

from kerasdist.collectives.communicator import Communicator, gather_json
from kerasdist.collectives.connect import TRANSPORTS, Job, connect

__all__ = ["TRANSPORTS", "Communicator", "Job", "connect", "gather_json"]
