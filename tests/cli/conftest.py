import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launching import Launcher, Terminal, launcher_in, terminals_of


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launcher_in(tmp_path) as made:
        yield made


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[list[Launcher]]:
    with contextlib.ExitStack() as undo:
        made = []
        for host in range(3):
            (tmp_path / str(host)).mkdir()
            made.append(undo.enter_context(launcher_in(tmp_path / str(host))))
            made[-1].env["KERASDIST_SECRET"] = "0123456789abcdef" * 2
        yield made


@pytest.fixture
def terminal(launcher: Launcher) -> Iterator[Callable[..., Terminal]]:
    with terminals_of(launcher) as start:
        yield start
