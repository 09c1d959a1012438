"""Compression of gradients: what workers send in place of whole gradients.

A compressor is pure but for two functions that it is given:

    memory = compressor.init(shapes)
    sums, memory, sent = compressor.reduce(gradients, memory, all_reduce, all_gather)

`contract` has the interface and the names, each other module one compressor. Where
the memories are kept, and which gradients go through a compressor, is decided in
`kerasdist.strategies.reduce.compressed`.
"""

from __future__ import annotations

from kerasdist.compression.contract import Compressor
from kerasdist.compression.memoryless import Factors, HalfPrecision
from kerasdist.compression.power_sgd import PowerSGD
from kerasdist.compression.top_k import TopK

__all__ = [
    "Compressor",
    "Factors",
    "HalfPrecision",
    "PowerSGD",
    "TopK",
    "compressor_of",
]

_BY_NAME = {
    "bf16": lambda: HalfPrecision("bf16"),
    "fp16": lambda: HalfPrecision("fp16"),
    "factors": Factors,
    "powersgd": PowerSGD,
    "topk": TopK,
}


def compressor_of(given: object) -> Compressor | None:
    """Return the compressor that the argument `compression` of a strategy stands for.

    Args:
        given: A name, with its default parameters; a compressor; or None.

    Raises:
        ValueError: There is no such name.
    """
    if given is None or isinstance(given, Compressor):
        return given
    if isinstance(given, str) and given in _BY_NAME:
        return _BY_NAME[given]()
    names = ", ".join(repr(name) for name in _BY_NAME)
    raise ValueError(
        f"`compression` must be None, one of {names}, or a compressor such as "
        f"`kerasdist.PowerSGD(rank=2)`. Received: compression={given!r}."
    )
