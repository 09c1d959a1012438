"""Tests that run at the same time, and those that have the machine for themselves."""

from __future__ import annotations

import os
import threading

import pytest

from turns import Turns
from waiting import wait_until


@pytest.fixture
def begin(tmp_path):
    """Starts a "test" in a thread; returns whether it runs, and what ends it."""
    turns, ends, threads = Turns(tmp_path), [], []

    def start(**how):
        runs, end = threading.Event(), threading.Event()

        def run():
            with turns.one(**how):
                runs.set()
                end.wait(60)
            runs.clear()

        threads.append(threading.Thread(target=run))
        ends.append(end)
        threads[-1].start()
        return runs, end

    yield start
    for end in ends:
        end.set()
    for thread in threads:
        thread.join(60)


def test_others_run_at_the_same_time(begin):
    for runs, _ in [begin(alone=False) for _ in range(3)]:
        assert runs.wait(60)


def test_alone_waits_for_those_that_run_and_the_next_ones_wait_for_it(begin):
    first, end_first = begin(alone=False)
    assert first.wait(60)
    alone, end_alone = begin(alone=True)
    assert not alone.wait(0.1)
    after, _ = begin(alone=False)
    # It would never come to its turn if others went by.
    assert not after.wait(0.1)
    end_first.set()
    assert alone.wait(60)
    assert not after.wait(0.1)
    end_alone.set()
    assert after.wait(60)


def test_two_that_want_to_be_alone_run_one_after_the_other(begin):
    jobs = [begin(alone=True) for _ in range(2)]
    for _ in jobs:
        wait_until(
            lambda jobs=jobs: any(runs.is_set() for runs, _ in jobs), "one of them"
        )
        (one,) = [job for job in jobs if job[0].is_set()]
        one[1].set()
        wait_until(lambda one=one: not one[0].is_set(), "its end")
        jobs = [job for job in jobs if job is not one]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_process_that_a_test_has_left_keeps_nobody_waiting(tmp_path):
    turns = Turns(tmp_path)
    reader, writer = os.pipe()
    with turns.one(alone=True):
        pid = os.fork()
        if pid == 0:
            os.read(reader, 1)
            os._exit(0)
    with turns.one(alone=True):
        os.write(writer, b".")
        os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
