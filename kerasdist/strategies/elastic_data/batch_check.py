"""The check that a worker which has joined reads the same batches as the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from kerasdist.strategies.data.batch_check import SameBatches, different_batches


class ElasticBatches(SameBatches):
    """The check of an elastic job: a worker that has joined is wrong by itself.

    If only such workers read other batches than those that were there before, these
    continue. `join` has compared the training data, but not those of evaluations.
    """

    def _compare(self, checksum: Any) -> list[Any]:
        communicator = self._workers.communicator
        joined = getattr(communicator, "has_joined", False)
        mine = np.array([checksum, joined], np.int64)
        every = [tuple(each) for each in communicator.all_gather(mine)]
        old = [number for number, later in every if not later]
        right = (old or [number for number, _ in every])[0]
        if any(number != right for number in old) or int(checksum) != right:
            ranks = communicator.ranks
            wrong = [
                rank
                for rank, (number, _) in zip(ranks, every, strict=True)
                if number != right
            ]
            first = next(rank for rank in ranks if rank not in wrong)
            self._workers.fault = self._explain(different_batches(wrong, first))
            raise self._workers.fault
        return [np.int64(checksum)]
