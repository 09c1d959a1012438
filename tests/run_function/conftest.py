"""The launcher, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import Launcher, launcher_in


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launcher_in(tmp_path) as made:
        yield made
