"""The division of gradients into buckets, each sent by a collective of its own.

The backward pass computes the gradients of the last layers first, so those are in the
first bucket, which is sent while the rest of the pass still runs: TensorFlow starts a
collective as soon as its own inputs are computed.

    computing    | grad D | grad C | grad B | grad A |            | update
    on the wire           |  bucket D, C    |   bucket B, A       |
"""

from __future__ import annotations

from collections.abc import Sequence


def in_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Divide gradients into buckets, from the last one to the first.

    The result depends only on numbers that are the same on all workers, and so do the
    buckets' contents and order.

    Args:
        sizes: Bytes of each gradient.
        limit: Maximum bytes of a bucket; a larger gradient has a bucket of its own.

    Returns:
        Indices of gradients, by bucket, in the order in which buckets are sent.
    """
    result: list[list[int]] = []
    room = 0
    for index in reversed(range(len(sizes))):
        if not result or sizes[index] > room:
            result.append([])
            room = limit
        result[-1].append(index)
        room -= sizes[index]
    return result
