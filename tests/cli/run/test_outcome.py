import contextlib
import os
import re
import signal
import types

import pytest

from kerasdist import errors
from kerasdist.cli.run import outcome
from kerasdist.cli.run.job_spec import JobSpec
from kerasdist.cli.run.nodes import LocalPart
from kerasdist.cli.run.options import ElasticOptions
from kerasdist.cli.run.output import JobOutput, Started
from kerasdist.transport import log
from kerasdist.transport.liveness.failure_protocol import EndedTasks, FinalError
from kerasdist.transport.liveness.launcher_pipe import Reporter, ServerReporter

# Each begins with its name and the number of workers, maybe of servers, and the options
# of an elastic job. Then come what happens, the exit code, and what is printed: shown
# output after ">", the rest of a line indented. See `Played.happen`.
PLAIN = """
[all is well] 3 2
=> 0
[an exit] 3
rank 1 ends 7, prints I go => 7
rank 1 failed with exit code 7; ENDED
rank 1 left no traceback; the end of rank 1's output:
> I go
all of its output: LOG
[a signal] 2
rank 1 ends -9 => 137
rank 1 KILLED; ENDED
rank 1 left no traceback; and no output
[who is blamed ends last] 3
rank 2 ends 1; rank 0 blames rank 1; rank 0 raises WorkerLost 1
rank 1 ends 9, error => 9
rank 1 failed with exit code 9; ENDED
the end of rank 1's output:
> ERROR
all of its output: LOG
afterwards rank 0 failed with exit code 1: WorkerLost: gone
afterwards rank 2 failed with exit code 1
[an early end without an error] 2
rank 1 ends 0; rank 0 blames rank 1; rank 0 raises WorkerLost 1 => 1
rank 0 failed with exit code 1; ENDED
before that, rank 1 ended with code 0 while others still needed it
the end of rank 0's output:
> Traceback (most recent call last): / WorkerLost: gone
[one that had to be ended after its error] 2
rank 0 blames rank 1; rank 0 raises WorkerLost 1; rank 1 ends -9, error, by us => 1
rank 0 failed with exit code 1; ENDED
before that, rank 1 was lost to the others, and had to be ended
the end of rank 1's output:
> ERROR
all of its output: LOG
rank 0: WorkerLost: gone
[ranks that differ, by the time of their tracebacks] 3
rank 0 blames none; rank 0 ends 3; rank 1 ends 4, error at 990; rank 2 ends 5 => 4
rank 1 failed with exit code 4; ENDED
the end of rank 1's output:
> ERROR
all of its output: LOG
afterwards rank 0 failed with exit code 3
afterwards rank 2 failed with exit code 5
[the last job of a script, its first report] 3
rank 0 blames rank 1; rank 1 blames rank 2 in job 2; rank 1 ends 1
rank 0 blames rank 1 in job 2; rank 0 ends 1; rank 2 ends 8 => 8
rank 2 failed with exit code 8; ENDED
rank 2 left no traceback; and no output
afterwards rank 0 failed with exit code 1
afterwards rank 1 failed with exit code 1
[the same error on all ranks] 2
rank 1 raises ValueError 1; rank 0 raises ValueError 1 => 1
rank 1 failed with exit code 1; ENDED
rank 1 ended with the error of rank 0, which stands above
afterwards rank 0 failed with exit code 1
[a server that gave up] 1 1
server 0 says gave_up; server 0 ends 1; rank 0 ends 6 => 6
rank 0 failed with exit code 6; ALL ENDED
afterwards server 0 failed with exit code 1
[a server that is blamed ends last] 2 2
rank 1 blames server 1; rank 1 ends 1; server 1 ends 6 => 6
server 1 failed with exit code 6; ALL ENDED
server 1 left no traceback; and no output
afterwards rank 1 failed with exit code 1
"""

ASYNCHRONOUS = """
[a killed worker] 3 1
server 0 says begun; rank 1 ends -9 => 0
rank 1 was lost: it KILLED; the others go on
the job has finished without rank 1
[the chief and an error] 3 1
server 0 says begun; rank 1 ends 2, prints x; rank 0 ends -15 => 143
rank 1 was lost: it failed with exit code 2; the others go on
rank 0 was lost: it was ended by signal SIGTERM (15); the others go on
the job has finished without rank 0 and rank 1
that was the chief: what it alone writes, the model for instance, may be missing, so
  this is no success
rank 1 failed with exit code 2 by itself: this is no success
rank 1 left no traceback; the end of rank 1's output:
> x
all of its output: LOG
[one that server 0 doesn't hear] 2 1
server 0 says begun; server 0 says lost 1; 1.0 s later; rank 1 ends -9, by us => 0
rank 1 was lost: nothing was received from it; the others go on
the job has finished without rank 1
[one that wakes up too late has made no mistake] 2 1
server 0 says begun; server 0 says lost 1; 1.0 s later; rank 1 blames server 0
rank 1 ends 1 => 0
rank 1 was lost: nothing was received from it; the others go on
the job has finished without rank 1
[all workers, the first one counts] 2 1
server 0 says begun; rank 1 ends -9; rank 0 ends -15 => 137
rank 1 was lost: it KILLED; the others go on
rank 0 was lost: it was ended by signal SIGTERM (15)
rank 1 KILLED; ALL ENDED
rank 1 left no traceback; and no output
afterwards rank 0 was ended by signal SIGTERM (15)
[another process takes its place] 2 1
server 0 says begun; rank 1 ends -9; server 0 says joined 1 => 0
rank 1 was lost: it KILLED; the others go on
rank 1 joined again
[a server that may be started again] 2 1
server 0 says begun, waits 30; server 0 ends -9; rank 1 ends -9 => 0
server 0 was lost: it KILLED; the workers wait 30 s for it to be started again
rank 1 was lost: it KILLED; the others go on
the job has finished without rank 1
[and is not] 2 1
server 0 says begun, waits 30; server 0 ends -9; rank 1 blames server 0; rank 1 ends 1
=> 137
server 0 was lost: it KILLED; the workers wait 30 s for it to be started again
server 0 KILLED; ALL ENDED
server 0 left no traceback; and no output
afterwards rank 1 failed with exit code 1
[a server with an error isn't waited for] 2 1
server 0 says begun, waits 30; server 0 ends 1 => 1
server 0 failed with exit code 1; ALL ENDED
server 0 left no traceback; and no output
[who was lost before is no witness] 3 2
server 0 says begun; server 1 says begun; server 1 says lost 1; rank 1 blames server 1
rank 2 blames rank 1; rank 2 ends 1 => 1
rank 2 failed with exit code 1; ALL ENDED
before that, rank 1 was lost to the others, and had to be ended
rank 2 left no traceback; and no output
"""

ELASTIC = """
[a killed worker] 3 0 restarts=0
rank 1 ends -9 => 0
rank 1 (HOST) KILLED; the others go on
finished: rank 0, rank 2; lost: rank 1 (SIGKILL)
[a killed chief] 3 0 restarts=0
rank 0 ends -9; epoch 1 has 2 1 after 0.25 s; epoch 0 has 1 2 after 9.0 s
epoch 2 has 2 after 0.25 s => 0
rank 0 (HOST) KILLED; the others go on
rank 2 is the chief from step 5 on: its output is shown from here
finished: rank 1, rank 2; lost: rank 0 (SIGKILL); pauses: 2, 0.50 s in all
[an error] 3 0 restarts=0
rank 1 ends 3, prints the reason => 0
rank 1 (HOST) failed with exit code 3; the others go on
rank 1 left no traceback; the end of rank 1's output:
> the reason
finished: rank 0, rank 2; lost: rank 1 (exit code 3)
[an error that follows from a loss] 2 0 restarts=0
rank 0 blames rank 1; rank 0 raises WorkerLost 1; rank 1 ends -9 => 137
rank 0 (HOST) failed with exit code 1, because another task was lost
rank 1 (HOST) KILLED
rank 1 KILLED; ENDED
rank 1 left no traceback; and no output
afterwards rank 0 failed with exit code 1: WorkerLost: gone
finished: none; lost: rank 0 (exit code 1), rank 1 (SIGKILL)
[who was asked to leave isn't started again] 2 0 restarts=3
rank 1 ends -15; 100 s later; again: none => 0
rank 1 (HOST) was ended by signal SIGTERM (15); the others go on; it isn't started again
finished: rank 0; left: rank 1
[restarts are counted for all, and the pauses grow] 2 0 restarts=3
rank 1 ends -9; 1.0 s later; again: rank 1; rank 1 ends -9; 1.9 s later; again: none
0.1 s later; again: rank 1; rank 0 ends -9; 1.0 s later; again: rank 0; rank 1 ends -9
=> 0
rank 1 (HOST) KILLED; the others go on; it is started again in 1 s (restart 1 of 3)
rank 1 (HOST) KILLED; the others go on; it is started again in 2 s (restart 2 of 3)
rank 0 (HOST) KILLED; the others go on; it is started again in 1 s (restart 3 of 3)
rank 1 (HOST) KILLED; the others go on
finished: rank 0; lost: rank 0 (SIGKILL), rank 1 (SIGKILL, SIGKILL, SIGKILL); started
  again: rank 0 (once), rank 1 (2 times)
[all are started again, and rank 0 is the chief] 2 0 restarts=2
rank 0 ends -9; epoch 1 has 1 after 0 s; rank 1 ends -9; 1.1 s later
again: rank 0, rank 1; epoch 0 has 0 1 after 0.25 s => 0
rank 0 (HOST) KILLED; the others go on; it is started again in 1 s (restart 1 of 2)
rank 1 is the chief from step 5 on: its output is shown from here
rank 1 (HOST) KILLED; it is started again in 1 s (restart 2 of 2)
finished: rank 0, rank 1; lost: rank 0 (SIGKILL), rank 1 (SIGKILL); started again: rank
  0 (once), rank 1 (once); pauses: 1, 0.25 s in all
[when one has finished none is started again] 2 0 restarts=3
rank 1 ends -9; rank 0 ends 0; 100 s later; again: none => 0
rank 1 (HOST) KILLED; the others go on; it is started again in 1 s (restart 1 of 3)
finished: rank 0; lost: rank 1 (SIGKILL)
[the last server] 2 1 restarts=0
server 0 ends -9 => 137
server 0 (HOST) KILLED
server 0 KILLED; ALL ENDED
server 0 left no traceback; and no output
finished: none; lost: rank 0 (ended by the launcher), rank 1 (ended by the launcher),
  server 0 (SIGKILL)
"""
SHORT = {
    "KILLED": "was ended by signal SIGKILL (9), sent by another process, or by the "
    "system when memory ran out",
    "ALL ENDED": "the other workers and servers were ended",
    "ENDED": "the other workers were ended",
    "> ERROR": "> Traceback (most recent call last): / ValueError: gone",
    " / ": "\n> ",
    "\n  ": " ",
}
EVERYWHERE = LocalPart(cluster={"worker": ["HOST"] * 3, "ps": ["HOST"] * 2})
BROKEN = "Traceback (most recent call last):\nValueError: gone"


class Played:
    def __init__(self, folder, monkeypatch, workers, servers=0, **options):
        self.now = 1000.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(outcome, "time", clock)
        self.folder = folder
        self.undo = contextlib.ExitStack()
        settings = None
        if options:
            settings = ElasticOptions(
                **{"min_workers": 1, "grace": 1.0, "size": workers},
                **{"max_workers": workers, **options},
            )
        job = JobSpec(
            **{"size": workers, "servers": servers, "command": (), "environ": {}},
            **{"log_dir": None, "elastic": settings, "part": EVERYWHERE},
        )
        self.tasks = [Started(task=task, process=None, tail=None) for task in job.tasks]
        self.outcome = outcome.JobOutcome(job, self.tasks, JobOutput(job, None))
        self.environ = self.outcome.pipe.environ
        if settings is not None:
            self.environ |= self.outcome.ended.environ
            self.undo.callback(self.outcome.ended.close)
        self.undo.callback(os.close, self.outcome.pipe.reading)
        self.undo.callback(os.close, self.outcome.pipe.writing)

    def __getitem__(self, name):
        return next(each for each in self.tasks if str(each.task) == name)

    def happen(self, event):
        event, *more = event.split(", ") if "ends" in event else [event]
        words = event.replace(",", "").split()
        name, environ = " ".join(words[:2]), self.environ
        match words:
            case [_, _, "ends", code]:
                self.end(self[name], int(code), *more)
            case [_, _, "raises", kind, code]:
                self.raises(self[name], kind)
                self.end(self[name], int(code))
            case ["rank", index, "blames", kind, *rest]:
                lost = (int(rest[0]) if rest else 0, "host:1", 7, "gone")
                error = errors.CollectiveMismatch("Ranks differ.")
                if rest:
                    kinds = {"rank": errors.WorkerLost, "server": errors.ServerLost}
                    error = kinds[kind](*lost)
                Reporter(f"job {rest[1:]}", int(index), environ).failed(error)
            case ["server", index, "says", what, *rest]:
                server = ServerReporter(int(index), environ)
                facts = {}
                if what == "begun":
                    facts["patience"] = float(rest[1]) if rest else 0.0
                elif what == "failed":
                    facts["reason"] = "CollectiveMismatch: Ranks differ."
                elif what != "gave_up":
                    why = "nothing was received from it"
                    facts = {"rank": int(rest[0]), "reason": why}
                server.report(what, **facts)
            case [seconds, "s", "later"]:
                self.now += float(seconds)
            case ["epoch", epoch, "has", *ranks, "after", pause, "s"]:
                for rank in ranks:  # all of them report the same
                    Reporter("job", int(rank), environ).members(
                        int(epoch), list(map(int, ranks)), step=5, pause=float(pause)
                    )
            case ["again:", *_]:
                ended = self.outcome.take_restarts()
                names = ", ".join(str(each.task) for each in ended)
                assert event == f"again: {names or 'none'}"
                for each in ended:
                    again = Started(
                        **{"task": each.task, "process": None, "tail": None},
                        incarnation=each.incarnation + 1,
                    )
                    self.tasks[self.tasks.index(each)] = again
            case _:
                assert not event
        self.outcome.read()

    def end(self, task, code, *more):
        self.now += 0.01
        task.code, task.ended_by_us = code, "by us" in more
        task.ended_at = int(self.now * 1e9)
        for each in more:
            if each.startswith(("error", "prints ")):
                task.log = self.folder / f"{task.task.tag}.log"
                task.log.write_text(each[7:] if each[0] == "p" else BROKEN)
                at = float(each.partition(" at ")[2] or self.now)
                os.utime(task.log, ns=(int(at * 1e9), int(at * 1e9)))
        self.outcome.fails_with(task)

    def raises(self, task, kind):
        message = f"{kind}: gone"
        final = FinalError(
            text=f"{BROKEN.splitlines()[0]}\n{message}",
            message=message,
            consequence=kind == "WorkerLost",
        )
        path = self.folder / f"{task.task.tag}.error"
        path.write_bytes(final.encode())
        task.error_file = self.undo.enter_context(path.open("rb"))

    def finish(self):
        """All that still run end, or are ended if the job has failed."""
        failed = self.outcome.failed_at is not None
        for task in self.tasks:
            if task.code is None:
                self.end(task, *((-15, "by us") if failed else (0,)))
        return self.outcome.report(None, launcher_lost=False)


@pytest.fixture
def play(tmp_path, monkeypatch):
    with contextlib.ExitStack() as undo:

        def begin(*sizes, **options):
            played = Played(tmp_path, monkeypatch, *sizes, **options)
            undo.enter_context(played.undo)
            return played

        yield begin


@pytest.fixture
def lines(said):

    def printed():
        log.flush(None)
        return [line.removeprefix("kerasdist run: ") for line in said()]

    return printed


CASES = [
    pytest.param(case, id=f"{kind}: {case[1 : case.index(']')]}")
    for kind, table in (
        ("plain", PLAIN),
        ("asynchronous", ASYNCHRONOUS),
        ("elastic", ELASTIC),
    )
    for case in re.split(r"(?m)^(?=\[)", table)[1:]
]


@pytest.mark.parametrize("case", CASES)
def test_the_outcome(play, lines, capsys, case):
    text, end = case.split("=> ")
    title, *events = text.splitlines()
    sizes = title.partition("] ")[2].split()
    options = {
        name: int(value)
        for name, _, value in (each.partition("=") for each in sizes)
        if value
    }
    played = play(*(int(size) for size in sizes if size.isdigit()), **options)
    for event in "; ".join(events).split("; "):
        played.happen(event.strip())
    code = played.finish()
    printed = "\n".join(lines())
    printed = re.sub(r"(?m)^(all of its output: ).*", r"\1LOG", printed)
    shown = "".join(f"> {line}\n" for line in capsys.readouterr().err.splitlines())
    printed = re.sub(r"(?m)('s output:)\n?", rf"\1\n{shown}", printed)
    for short, long in SHORT.items():
        end = end.replace(short, long)
    assert f"{code}\n{printed}".strip() == end.strip()


def test_an_end_from_outside(play, lines):
    played = play(2, 1)
    played.happen("server 0 says begun")
    played.outcome.over = True
    played.happen("rank 1 ends -2")
    assert played.outcome.report(signal.SIGINT, launcher_lost=False) == 130
    assert lines() == ["ended by SIGINT; all workers and servers are ended"]
    assert played.outcome.report(None, launcher_lost=True) == 137


def test_only_lost_workers_run_when_the_servers_have_ended(play):
    played = play(2, 1)
    for event in ("begun", "lost 1"):
        played.happen(f"server 0 says {event}")
    for event in ("1.0 s later", "rank 0 ends 0", "server 0 ends 0"):
        assert not played.outcome.only_lost_workers_running
        played.happen(event)
    assert played.outcome.only_lost_workers_running


def test_who_still_runs_in_an_elastic_job(play):
    played = play(3, 1, restarts=0)
    for event in ("epoch 1 has 0 2 after 0 s", "rank 0 ends 0", "rank 2 ends 0"):
        assert not played.outcome.only_lost_workers_running
        played.happen(event)
    assert played.outcome.only_lost_workers_running  # rank 1 is no member
    assert not played.outcome.only_servers_running
    played.happen("rank 1 ends -9, by us")
    assert played.outcome.only_servers_running
    played = play(2, 1, restarts=1)
    for event in ("rank 0 ends -9", "rank 1 ends -9"):
        played.happen(event)
        assert not played.outcome.only_servers_running  # they wait for rank 0


def test_workers_read_who_has_ended_for_good(play):
    played = play(3, restarts=1)
    read = EndedTasks(played.environ).read
    played.happen("rank 1 ends -9")
    assert read() == frozenset()  # it is started again
    played.happen("rank 0 ends -9")
    assert read() == {0}


def test_the_pause_before_a_restart_grows_up_to_a_minute():
    pauses = map(outcome.pause_before_restart, (*range(7), 10_000, 0))
    assert list(pauses) == [1, 2, 4, 8, 16, 32, 60, 60, 1]


def test_an_elastic_job_grows_up_to_its_limit(play, lines):
    played = play(2, max_workers=3, restarts=1)
    added = played.outcome.take_growth()
    played.tasks.append(Started(task=added, process=None, tail=None))
    assert played.outcome.take_growth() is None
    played.happen("rank 1 ends -9")
    assert played.outcome.take_growth() is played["rank 1"]
    played.happen("100 s later")
    played.happen("again: none")  # it has been already
    played.happen("rank 0 ends 0")
    assert played.outcome.take_growth() is None
    assert [line for line in lines() if "SIGKILL" not in line] == [
        "rank 2 (HOST) is added: 3 of 3 workers",
        "no worker is added: all 3 run (--max-workers)",
        "rank 1 is started again",
        "no worker is added: the job is ending",
    ]
