"""Patterns of layer paths, and the device that each stands for.

A pattern is a regular expression, as in `keras.distribution.LayoutMap`. It matches a
layer if it matches the whole of the layer's path, or of the end of it that begins
after a "/". A pattern that ends in "/.*" also matches the layer before the "/":

    pattern          matches                              doesn't match
    encoder/.*       encoder, encoder/dense,              encoder_2/dense
                     my_model/encoder/block/dense
    dense_1          dense_1, my_model/dense_1            dense_10, dense_1/inner
    .*dense.*        every path with "dense" in it
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """The match of a path.

    Attributes:
        pattern: The pattern.
        device: The device that it stands for.
        above: The level of the match: 0 if the path itself matches, 1 for its parent.
    """

    pattern: str
    device: str
    above: int


class Patterns:
    """A mapping from patterns to devices, in order.

    Args:
        devices: From each pattern to a device.

    Raises:
        ValueError: Patterns aren't regular expressions; all of them are named.
    """

    def __init__(self, devices: Mapping[str, str]) -> None:
        self._devices = dict(devices)
        self._of_path = functools.cache(self._search)
        self._matchers: dict[str, re.Pattern[str]] = {}
        faults = []
        for pattern in self._devices:
            try:
                re.compile(pattern)
                self._matchers[pattern] = re.compile(f"(?:.*/)?(?:{pattern})")
            except re.error as error:
                faults.append(f"{pattern!r} ({error})")
        if faults:
            raise ValueError(
                "The patterns of a placement must be regular expressions. Received: "
                f"{', '.join(faults)}. To match one layer write its path, to match all "
                "layers inside of one write 'path/.*'."
            )

    def find(self, paths: Iterable[str]) -> Match | None:
        """Find the innermost match of a layer.

        The layer itself precedes its parent, and so on upwards. Of several patterns
        that match at one level, a pattern that equals the path precedes the others,
        else the first of the mapping counts.

        Args:
            paths: The names by which the layer is known, as "model/encoder/dense".
        """
        found = [match for path in paths if (match := self._of_path(path)) is not None]
        return min(found, key=lambda match: match.above, default=None)

    def _search(self, path: str) -> Match | None:
        above = 0
        while path:
            pattern = self._matching(path)
            if pattern is not None:
                return Match(
                    pattern=pattern, device=self._devices[pattern], above=above
                )
            path, _, _ = path.rpartition("/")
            above += 1
        return None

    def _matching(self, path: str) -> str | None:
        """Return the pattern that matches a path itself, not one of its parents."""
        literal = [
            pattern
            for pattern in self._devices
            if path == pattern or path.endswith(f"/{pattern}")
        ]
        if literal:
            # "block/dense" rather than "dense".
            return max(literal, key=len)
        for pattern, matcher in self._matchers.items():
            if _matches(matcher, path):
                return pattern
        return None

    @property
    def has_catch_all(self) -> bool:
        """Whether a pattern matches all layers."""
        return any(
            matcher.fullmatch("a") and matcher.fullmatch("b_1")
            for matcher in self._matchers.values()
        )

    def unmatched(self, layers: Iterable[Iterable[str]]) -> list[str]:
        """Return the patterns that match no layer; each layer is given by its paths."""
        paths = [path for layer in layers for path in layer]
        return [
            pattern
            for pattern, matcher in self._matchers.items()
            if not any(_matches(matcher, path) for path in paths)
        ]


def _matches(matcher: re.Pattern[str], path: str) -> bool:
    return bool(matcher.fullmatch(path) or matcher.fullmatch(f"{path}/"))
