"""Collectives between workers on numpy arrays. No TensorFlow, no Keras."""

from kerasdist.collectives.communicator import Communicator
from kerasdist.collectives.connect import TRANSPORTS, Job, connect

__all__ = ["TRANSPORTS", "Communicator", "Job", "connect"]
