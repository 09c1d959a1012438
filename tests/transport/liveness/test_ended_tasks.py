"""The launcher's list of tasks that have ended for good."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kerasdist.transport.liveness.ended_tasks import EndedTaskList, EndedTasks


@pytest.fixture
def written() -> Iterator[EndedTaskList]:
    made = EndedTaskList(4)
    yield made
    made.close()


def test_a_worker_reads_what_the_launcher_has_marked(written: EndedTaskList) -> None:
    read = EndedTasks(written.environ)
    assert read.read() == frozenset()
    written.mark(0, ended=True)
    written.mark(3, ended=True)
    assert read.read() == {0, 3}
    # It is started again after all.
    written.mark(3, ended=False)
    assert read.read() == {0}


def test_processes_of_the_script_dont_inherit_it(written: EndedTaskList) -> None:
    os.set_inheritable(written.fileno(), True)
    EndedTasks(written.environ)
    assert not os.get_inheritable(written.fileno())


def test_without_a_launcher_no_task_has_ended(written: EndedTaskList) -> None:
    written.mark(0, ended=True)
    (name,) = written.environ
    for text in ("", "no number", "0:1", f"{written.fileno()}:1"):
        assert EndedTasks({name: text}).read() == frozenset()
