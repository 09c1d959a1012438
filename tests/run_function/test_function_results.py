"""The files in which workers leave their results."""

from __future__ import annotations

import pickle
import resource
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

import pytest

from kerasdist.run_function.launcher import (
    RemoteError,
    read_error,
    read_result,
    write_error,
    write_value,
)


@pytest.fixture
def file() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as made:
        yield made


def test_a_value_and_its_absence(file: IO[bytes]) -> None:
    """A file that isn't whole has none: its process was killed."""
    assert read_result(file) is None
    with pytest.raises((TypeError, pickle.PicklingError)):
        write_value(file.fileno(), [bytes(1_000_000), threading.Lock()])
    assert read_result(file) is None
    write_value(file.fileno(), None)
    assert read_result(file) == (None,)
    assert read_error(file) is None
    write_value(file.fileno(), {"a": [1, 2]})
    assert read_result(file) == ({"a": [1, 2]},)
    file.truncate(file.seek(0, 2) - 1)
    assert read_result(file) is None


def test_an_error_that_cannot_be_pickled(file: IO[bytes]) -> None:
    try:
        raise LookupError("made", threading.Lock())
    except LookupError as error:
        write_error(file.fileno(), "call", error)
    found = read_result(file)
    assert isinstance(found, RemoteError)
    assert found == read_error(file)
    assert found.message.startswith("LookupError: ('made', <unlocked")
    assert 'raise LookupError("made", threading.Lock())' in found.traceback
    assert found.exception() is None


def test_an_error_after_the_disk_was_full(file: IO[bytes]) -> None:
    """The part of the value that was written makes room for the error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"^\[Errno 27\]") as info:
            write_value(file.fileno(), ["a" * 10, bytes(1_000_000)])
        write_error(file.fileno(), "result", info.value, "list")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found = read_error(file)
    assert found is not None
    assert (found.stage, found.result) == ("result", "list")
    assert isinstance(found.exception(), OSError)
