"""Clocks: who may go on; over random schedules no read misses what it mustn't."""

from __future__ import annotations

import pytest

from kerasdist.parameter_server.served_table import Clocks


def test_nobody_waits_for_a_parked_or_a_lost_worker():
    clocks = Clocks(range(3), 0)
    clocks.tick(0, 5)
    assert not clocks.may_read(0, 5)
    clocks.park(1)
    assert not clocks.may_read(0, 5)
    assert clocks.drop(2) == 0
    assert clocks.may_read(0, 5)
    assert clocks.drop(2) is None
    assert clocks.may_read(2, 9)
    clocks.park(0)
    assert clocks.least == 5
    clocks.align([0, 1, 2])
    assert clocks.live == {0: 5, 1: 5}
    clocks.tick(0, 6)
    assert not clocks.may_read(0, 6)


def test_a_joiner_begins_at_the_least_live_clock():
    clocks = Clocks(range(3), 1)
    clocks.tick(0, 8)
    clocks.tick(1, 9)
    clocks.drop(2)
    assert clocks.join(2) == 8
    assert clocks.join(2, 4) == 4
    assert clocks.clock(2) == 4
    assert clocks.join(7) == 4
    empty = Clocks([], None)
    assert empty.join(0) == 0


def test_clocks_never_go_back_and_strangers_have_none():
    clocks = Clocks([0], 3)
    clocks.tick(0, 4)
    clocks.tick(0, 2)
    clocks.tick(5, 2)
    clocks.park(5)
    assert clocks.live == {0: 4}
    assert clocks.clock(5) is None
    clocks.observe(0, 2)
    clocks.observe(0, 2)
    assert clocks.observed == {0: {2: 2}}
    with pytest.raises(ValueError, match="max_staleness=-1; expected >= 0 or None"):
        Clocks([0], -1)
