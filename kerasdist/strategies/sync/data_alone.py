"""The data of one worker whose job is elastic: another start may continue with them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kerasdist._tf.marks import WHOLE_DATA
from kerasdist.strategies.data.auto_shard import has_own_policy
from kerasdist.strategies.elastic_data.alone import (
    OWN_PASS,
    SHARED_PASS,
    CountedDataset,
)
from kerasdist.strategies.elastic_data.arrays import ElasticArrays
from kerasdist.strategies.sync.data import SynchronousData


class DataAlone(SynchronousData):
    """The iterables of a job of one worker, whose passes and batches are counted.

    Args: See `SynchronousData`.
    """

    array_epochs = ElasticArrays

    def distribute_dataset(
        self,
        dataset: Any,
        length: int | None,
        generator: Any = None,
        *,
        is_items: bool = False,
    ) -> tuple[Any, int | None]:
        """See `SynchronousData.distribute_dataset`."""
        whole = WHOLE_DATA.get(dataset)
        dataset = dataset if whole is None else whole
        made, length = super().distribute_dataset(
            dataset, length, generator, is_items=is_items
        )
        if isinstance(dataset, tf.distribute.DistributedDataset):
            return made, length
        shared = self.shards and not has_own_policy(dataset)
        kind = SHARED_PASS if shared else OWN_PASS
        return CountedDataset(made, kind), length
