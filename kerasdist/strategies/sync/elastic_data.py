"""The division of Keras's data among workers that may be lost, or join."""

from __future__ import annotations

from kerasdist.strategies.elastic_data.arrays import ElasticArrays
from kerasdist.strategies.sync.data import SynchronousData

__all__ = ["ElasticData"]


class ElasticData(SynchronousData):
    """Iterables that go on, in the midst of an epoch, for other workers.

    They yield `_keras.RepeatableIterator`s.
    """

    array_epochs = ElasticArrays
