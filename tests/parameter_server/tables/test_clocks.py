from kerasdist.parameter_server.served_table import Clocks


def test_clocks_never_go_back_and_those_of_lost_workers_are_forgotten():
    clocks = Clocks(range(3), 1)
    for rank, clock in ((0, 8), (0, 2), (1, 9), (5, 2)):
        clocks.tick(rank, clock)
    assert clocks.live == {0: 8, 1: 9, 2: 0}
    assert not clocks.may_read(1, 9)
    assert (clocks.drop(2), clocks.drop(2)) == (0, None)
    assert clocks.may_read(1, 9)


def test_a_joiner_begins_at_the_least_live_clock():
    clocks = Clocks(range(2), 1)
    clocks.tick(0, 8)
    clocks.tick(1, 9)
    assert (clocks.join(2), clocks.join(2, 4), clocks.join(7)) == (8, 4, 4)
    assert Clocks([], None).join(0) == 0
