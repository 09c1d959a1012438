import pytest

import kerasdist
from workers import Workers

SCRIPT = """
import json, time
import kerasdist
from kerasdist import errors

def result(value):
    print("RESULT", json.dumps(value), flush=True)

strategy = kerasdist.RingStrategy(timeout=60)
place = [strategy.local_rank, strategy.local_size]
"""


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


def test_an_exception_in_the_block_is_reported_to_the_others():
    """Also if the script catches it, and goes on without the job."""
    script = SCRIPT
    script += """
try:
    with strategy:
        strategy.communicator.barrier()
        if strategy.rank == 1:
            raise RuntimeError("my own mistake")
        strategy.communicator.barrier()
except RuntimeError:
    result([place, "went on"])
except errors.WorkerLost as lost:
    result([place, str(lost)])
"""
    first, second = Workers(script, 2, deadline=90).results()
    assert first[0] == [0, 2]
    assert second == [[1, 2], "went on"]
    assert first[1].startswith("Rank 1 (")
    assert "RuntimeError: my own mistake" in first[1]
