"""The ring schedule: pure functions of numbers.

A buffer of E elements is cut into `size` chunks. In reduce-scatter every rank
sends one chunk to the right and adds the one received from the left, size-1
times; then each rank holds one finished chunk. In all-gather the finished chunks
are passed around, size-1 times. With 4 ranks, the chunk that rank r sends in each
step:

    step            0  1  2 | 3  4  5
    rank 0          0  3  2 | 1  0  3
    rank 1          1  0  3 | 2  1  0
    rank 2          2  1  0 | 3  2  1
    rank 3          3  2  1 | 0  3  2
                 reduce-scatter | all-gather

Each rank sends 2 (size-1)/size x E elements, the least possible (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 2009). Each chunk is summed in one order, on one path, so that all ranks
end with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator


def reduce_scatter_steps(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (chunk to send, chunk to receive and add), size-1 times.

    Afterwards `rank` holds the finished chunk (rank + 1) % size.
    """
    for step in range(size - 1):
        yield (rank - step) % size, (rank - step - 1) % size


def all_gather_steps(rank: int, size: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield (chunk to send, chunk to receive), size-1 times.

    Args:
        rank: The rank.
        size: Number of ranks.
        first: The chunk that rank 0 holds at the beginning; rank r holds
            (first + r) % size.
    """
    for step in range(size - 1):
        yield (rank + first - step) % size, (rank + first - step - 1) % size
