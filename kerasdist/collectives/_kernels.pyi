from kerasdist.collectives.row_exchange import Array

def combine(
    out: Array,
    values: Array,
    scale: float | None,
    other: Array | None,
    copy: Array | None,
    stream: bool,
) -> None: ...
