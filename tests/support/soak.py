"""Parameters of tests that only `make soak` runs.

@pytest.mark.parametrize("size", [2, soak(1), soak(3)])
@pytest.mark.parametrize("name", but_soak(["sgd"], OPTIMIZERS))
"""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def soak(*values: Any, id: str | None = None) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.soak)


def soaking(config: pytest.Config) -> bool:
    """Whether tests that are marked may run: jobs of several tests make more then."""
    return config.option.markexpr != "not soak"


def but_soak(always: Container[Any], values: Iterable[Any]) -> list[Any]:
    """All values, those that aren't in `always` for `make soak` alone."""
    return [value if value in always else soak(value) for value in values]
