import signal
import time

import pytest

from pace import bound
from workers import Workers

BEGIN = """
import ctypes, os, signal, sys, time
from kerasdist.collectives.elastic.termination import Termination, end_process

def wait(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()

def send(pid=None):
    os.kill(pid or os.getpid(), signal.SIGTERM)
"""


def run(script):
    with Workers(BEGIN + script, 1, deadline=40.0) as job:
        finished = job.wait_one(0)
    return finished.returncode, finished.output


@pytest.mark.parametrize(
    ("script", "shown", "told"),
    [
        ("Termination.acquire(1.5)\nsend()\ntime.sleep(60)", "", True),
        # Not interrupted by signals, as in functions of TensorFlow: no handler runs.
        (
            """
Termination.acquire(1.5)
send()
mutex = ctypes.create_string_buffer(64)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
""",
            *("", True),
        ),
        (
            f"""
termination = Termination.acquire({bound(0.6)})
with termination.in_fit():
    send()
    time.sleep({bound(0.35)})
    print("IN FIT", flush=True)
time.sleep(60)
""",
            *("IN FIT", True),
        ),
        (
            f"""
termination = Termination.acquire({bound(0.3)})
send()
assert wait(lambda: termination.requested)
termination.extend(120.0)
time.sleep({bound(0.4)})
print("LEFT", flush=True)
end_process()
""",
            *("LEFT", False),
        ),
    ],
    ids=["python", "native", "later in fit", "when all agree"],
)
def test_the_process_ends_by_the_signal_at_the_deadline(script, shown, told):
    begin = time.monotonic()
    code, output = run(script)
    assert code == -signal.SIGTERM
    assert shown in output
    assert ("this worker received SIGTERM" in output) is told
    assert ("and wrote no checkpoint" in output) is told
    assert time.monotonic() - begin < bound(30)


def test_handlers_of_the_script_and_its_wakeup_descriptor_are_left_alone():
    code, output = run("""
heard = []
for own in (lambda *_: heard.append("OWN"), signal.SIG_IGN):
    signal.signal(signal.SIGTERM, own)
    assert Termination.acquire(0.1) is None
    send()
    assert signal.getsignal(signal.SIGTERM) is own
assert heard == ["OWN"]

# One that comes later replaces ours.
signal.signal(signal.SIGTERM, signal.SIG_DFL)
termination = Termination.acquire(0.1)
signal.signal(signal.SIGTERM, own := lambda *_: None)
termination.release()
assert signal.getsignal(signal.SIGTERM) is own

signal.signal(signal.SIGTERM, signal.SIG_DFL)
reading, writing = os.pipe()
os.set_blocking(writing, False)
signal.set_wakeup_fd(writing)
# The last of two jobs gives back what was there.
first, second = Termination.acquire(30.0), Termination.acquire(30.0)
assert first is second
first.release()
assert signal.getsignal(signal.SIGTERM) is first
second.release()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert signal.set_wakeup_fd(writing) == writing
assert [t.name for t in __import__("threading").enumerate()] == ["MainThread"]

termination = Termination.acquire(30.0)
send()
assert wait(lambda: termination.requested)
assert os.read(reading, 9) == bytes([signal.SIGTERM])
assert signal.set_wakeup_fd(-1) == writing
""")
    assert code == 0, output


def test_a_forked_child_isnt_the_worker():
    """A pool of processes ends its children by SIGTERM."""
    code, output = run("""
termination = Termination.acquire(30.0)
child = os.fork()
if child == 0:
    time.sleep(60)
send(child)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
time.sleep(0.3)
assert not termination.requested
send()
assert wait(lambda: termination.requested)
""")
    assert code == 0, output
