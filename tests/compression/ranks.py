"""Ranks of a compressor, in threads: the two functions that it is given."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from pace import bound


class Ranks:
    """Runs a function on each rank at once.

    Attributes:
        calls: The kind and the bytes of each call of rank 0.
    """

    def __init__(self, size):
        self.size = size
        self.calls = []
        self._barrier = threading.Barrier(size)
        self._given = [None] * size

    def run(self, function):
        """Return what `function(rank, all_reduce, all_gather)` returns, by rank."""

        def one(rank):
            try:
                return function(
                    rank,
                    lambda tensors: self._all_reduce(rank, tensors),
                    lambda tensor: self._all_gather(rank, tensor),
                )
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))

    def _exchange(self, rank, kind, tensors):
        arrays = [tf.convert_to_tensor(tensor).numpy() for tensor in tensors]
        if rank == 0:
            self.calls.append((kind, sum(array.nbytes for array in arrays)))
        self._given[rank] = arrays
        self._barrier.wait(bound(60))
        every = list(self._given)
        self._barrier.wait(bound(60))
        return every

    def _all_reduce(self, rank, tensors):
        every = self._exchange(rank, "all_reduce", tensors)
        shapes = {tuple((a.shape, a.dtype.name) for a in arrays) for arrays in every}
        assert len(shapes) == 1, "ranks disagree about what is reduced"
        with np.errstate(all="ignore"):
            return [
                tf.convert_to_tensor(sum(parts[1:], parts[0]))
                for parts in zip(*every, strict=True)
            ]

    def _all_gather(self, rank, tensor):
        every = self._exchange(rank, "all_gather", [tensor])
        return tf.convert_to_tensor(np.concatenate([part for (part,) in every]))


class Job:
    """The ranks of a job with a compressor: their memories from step to step."""

    def __init__(self, compressor, size, shapes):
        self.ranks = Ranks(size)
        self.compressor = compressor
        self.memories = [compressor.init(shapes) for _ in range(size)]
        self.sent = 0

    def step(self, gradients):
        results = self.ranks.run(
            lambda rank, all_reduce, all_gather: self.compressor.reduce(
                gradients[rank], self.memories[rank], all_reduce, all_gather
            )
        )
        self.memories = [memory for _, memory, _ in results]
        self.sent = int(results[0][2])
        first = [np.asarray(total) for total in results[0][0]]
        for sums, _, _ in results[1:]:
            for one, other in zip(first, sums, strict=True):
                np.testing.assert_array_equal(one, np.asarray(other))
        return first
