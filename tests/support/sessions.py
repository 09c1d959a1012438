"""Jobs whose workers run one script after the other: what starts once is paid once.

    @pytest.fixture(scope="module")
    def run():
        with Session(SETUP, 2) as session:
            yield session.run

    def test_it(run):
        first, second = run("result(strategy.rank)")

`SETUP` imports, and makes the strategy. Each script begins with a copy of its names and
must leave the strategy open. Scripts that end badly end the session; those that follow
are jobs of their own, so that one failing test leads to no other.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from workers import Finished, Workers

# The workers' own: the names of scripts are made anew.
_LOOP = """
def _run_all():
    import gc, os, sys, time, types
    folder = os.path.dirname(sys.argv[0])
    names = {k: v for k, v in globals().items() if k != "_run_all"}
    number = 0
    while True:
        path = os.path.join(folder, f"body-{number}.py")
        while not os.path.exists(path):
            time.sleep(0.01)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if not text:
            return
        # A module of its own: classes that are pickled or saved name it.
        module = types.ModuleType("__main__")
        module.__dict__.update(names, __file__=path)
        sys.modules["__main__"] = module
        exec(compile(text, path, "exec"), module.__dict__)
        module.__dict__.clear()
        keras = sys.modules.get("keras")
        if keras is not None:
            keras.backend.clear_session()
        # What lives on is in no script's way: no collection looks at it again.
        gc.collect()
        gc.freeze()
        sys.stdout.write(f"\\nENDED {number}\\n")
        sys.stdout.flush()
        number += 1

_run_all()
"""


class Session:
    """The workers, and servers, of one job.

    `setup` is run once, first; `before` is what each script begins with. `deadline`:
    seconds that a script may take, see `bound`. `more`: other arguments of `Workers`.
    """

    def __init__(
        self,
        setup: str,
        size: int,
        *,
        before: str = "",
        deadline: float = 120.0,
        **more: Any,
    ) -> None:
        self._setup, self._size, self._before = setup, size, before
        self._deadline, self._more = deadline, more
        self._stack = contextlib.ExitStack()
        self._job: Workers | None = None
        self._number = 0
        # How much of each worker's output belongs to earlier scripts.
        self._behind: list[int] = []

    def __enter__(self) -> Session:
        self._job = self._stack.enter_context(self._workers(_LOOP))
        self._behind = [0] * self._size
        return self

    def _workers(self, script: str) -> Workers:
        return Workers(
            self._setup + script, self._size, deadline=self._deadline, **self._more
        )

    def run(self, body: str, **env: str) -> list[Any]:
        """What each worker has printed as `RESULT <json>`, the one thing."""
        return [finished.result for finished in self.finish(body, **env)]

    def finish(self, body: str, **env: str) -> list[Any]:
        """The workers as if they had ended, with the script's part of their output."""
        text = f"import os\nos.environ.update({env!r})\n" + self._before + body
        if self._job is None:
            with self._workers(text) as job:
                return job.succeed()[: self._size]
        job, self._job = self._job, None
        job.extend(self._deadline)
        _write(job.folder / f"body-{self._number}.py", text)
        job.wait_for_lines(f"ENDED {self._number}", self._size)
        self._number += 1
        self._job = job
        return [self._part(job, rank) for rank in range(self._size)]

    def _part(self, job: Workers, rank: int) -> Any:
        whole = job.output(rank)
        behind, self._behind[rank] = self._behind[rank], len(whole)
        return Finished(rank=rank, returncode=0, output=whole[behind:])

    def __exit__(self, *_: object) -> None:
        with self._stack:
            if self._job is not None:
                self._job.extend(self._deadline)
                _write(self._job.folder / f"body-{self._number}.py", "")
                self._job.succeed()


def _write(path: Path, text: str) -> None:
    """All at once: the workers look for it."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)
