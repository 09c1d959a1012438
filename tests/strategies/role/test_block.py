import pytest

import kerasdist


def test_the_end_of_the_block_leaves_the_job(caplog):
    with kerasdist.RingStrategy(cluster={}) as strategy:
        assert isinstance(strategy, kerasdist.RingStrategy)
        with strategy.scope():
            strategy.communicator.barrier()
    with pytest.raises(kerasdist.errors.TransportClosed, match="closed"):
        strategy.communicator.barrier()
    strategy.close()
    assert not caplog.messages


def test_a_block_without_the_scope_is_warned_of(caplog):
    """`with strategy:` looks like `with strategy.scope():`, and trains alone."""
    with kerasdist.ModelParallelStrategy({}, cluster={}):
        pass
    (line,) = caplog.messages
    assert "Write `with strategy.scope():` around their creation." in line


def test_an_exception_leaves_the_block_as_it_is(caplog):
    for error in (ValueError("mine"), SystemExit(3), KeyboardInterrupt()):
        strategy = kerasdist.RingStrategy(cluster={})
        with pytest.raises(type(error)) as caught, strategy:
            raise error
        assert caught.value is error
    assert not caplog.messages
