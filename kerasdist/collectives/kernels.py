"""Passes over large arrays: multiplied, added and stored at once.

Where `setup.py` has found a compiler they are compiled (`_kernels.c`). Else numpy gives
the same bits in up to three passes.
"""

from __future__ import annotations

import numpy as np

from kerasdist.collectives.row_exchange import Array

try:
    from kerasdist.collectives._kernels import combine as _combine
except ImportError:  # a pure wheel
    compiled = None
else:
    compiled = _combine

# Smaller arrays are as fast in numpy, whose calls cost less.
_LEAST_BYTES = 64 << 10


def combine(
    out: Array,
    values: Array,
    scale: float | None = None,
    operation: np.ufunc | None = None,
    other: Array | None = None,
    *,
    copy: Array | None = None,
    stream: bool = False,
) -> None:
    """Write `operation(values * scale, other)`.

    Args:
        out: The results; none of the other arrays, or exactly one of them.
        values: As many of the same dtype, each flat and contiguous like `out`.
        scale: A number, for arrays of floats; None: elements as they are. With 0 all
            products are 0, whatever the array holds (0 x NaN isn't).
        operation: For instance `numpy.add`; None if nothing is added.
        other: Its second argument.
        copy: Gets the results, too.
        stream: Whether results may be stored past the caches, because this core doesn't
            read them soon.
    """
    if (
        compiled is not None
        and out.nbytes >= _LEAST_BYTES
        and (operation is None or operation is np.add)
        and scale != 0
        # Usual floats, as a compiler understands them.
        and out.dtype.char in "fd"
        and out.dtype.isnative
        and out.flags.aligned
        and values.flags.aligned
    ):
        compiled(out, values, scale, other, copy, stream)
        return
    if scale == 0:
        out.fill(0)
    elif scale is not None:
        np.multiply(values, scale, out=out)
    elif operation is None:
        np.copyto(out, values)
    if operation is not None:
        operation(values if scale is None else out, other, out=out)
    if copy is not None:
        np.copyto(copy, out)
