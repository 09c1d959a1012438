"""The options of a data-parallel strategy."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a strategy, except those of the connections.

    Attributes:
        initial_state: The action of `fit` when the workers hold different weights
            before its first step: "check" or "broadcast".
        shard: The kind of data that Keras is given: "rows": the same on all workers,
            divided by rows; or "off": each worker's own.
        data: The action if they aren't the same: "auto", "same" or "chief".
        bucket_size: Bytes of gradients that are sent at once.
        compression: None, "bf16" or "fp16": the dtype in which gradients are sent.

    Raises:
        ValueError: One of them is wrong.
    """

    initial_state: str
    shard: str
    data: str
    bucket_size: int
    compression: str | None

    @property
    def shards(self) -> bool:
        """Whether the data are the same on all workers, each to take its part."""
        return self.shard == "rows"

    def __post_init__(self) -> None:
        if self.shard not in ("rows", "off"):
            raise ValueError(
                f"`shard` must be 'rows' or 'off'. Received: shard={self.shard!r}."
            )
        if self.data not in ("auto", "same", "chief"):
            raise ValueError(
                "`data` must be 'auto', 'same' or 'chief'. "
                f"Received: data={self.data!r}."
            )
        if isinstance(self.bucket_size, bool) or not (
            isinstance(self.bucket_size, int) and self.bucket_size > 0
        ):
            raise ValueError(
                "`bucket_size` must be a positive number of bytes. "
                f"Received: bucket_size={self.bucket_size!r}."
            )
        if self.compression not in (None, "bf16", "fp16"):
            raise ValueError(
                "`compression` must be None, 'bf16' or 'fp16'. "
                f"Received: compression={self.compression!r}."
            )
        if self.initial_state not in ("check", "broadcast"):
            raise ValueError(
                "`initial_state` must be 'check' or 'broadcast'. "
                f"Received: initial_state={self.initial_state!r}."
            )
