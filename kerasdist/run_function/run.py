"""`kerasdist.run`: a function in the workers of a job, from Python or a notebook."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import linecache
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from kerasdist.errors import ClusterError, FunctionError
from kerasdist.prediction.report import from_json
from kerasdist.prediction.simulation import Prediction
from kerasdist.run_function.launcher import (
    Outcome,
    RemoteError,
    TaskEnd,
    dump,
    launch,
    read_error,
    read_result,
)
from kerasdist.transport.liveness.launcher_pipe import REPORT_VARIABLE

# The options of `kerasdist run` for the arguments of `kerasdist.run`.

# The arguments that are options of the same name: their types, and those in words.
_TYPES: dict[str, tuple[Any, str]] = {
    "n": (int, "an integer"),
    "ps": (int, "an integer"),
    "hosts": (str | Sequence | None, "a text or a list of texts"),
    "gpus": (int | str, "a text or an integer"),
    "output": (str, "a text"),
    "bind": (str, "a text"),
    "min_workers": (int | None, "an integer"),
    "restarts": (int | None, "an integer"),
    **dict.fromkeys(
        ("hostfile", "ssh", "python", "log_dir", "malloc"),
        (str | bytes | os.PathLike | None, "a text"),
    ),
}
_LEAST = {"n": 1, "ps": 0, "min_workers": 0, "restarts": 0}
_KNOWN = {"output": ("chief", "all"), "bind": ("none", "cores")}


def _option(name: str, value: Any) -> list[str]:
    """Return what stands for an argument on the command line.

    The launcher checks the rest: whether hosts can be parsed, for instance.

    Raises:
        TypeError: It has another type.
        ValueError: It can't be used.
    """
    kind, in_words = _TYPES[name]
    is_list = name == "hosts" and isinstance(value, Sequence)
    if (
        not isinstance(value, kind)
        or isinstance(value, bool)
        or (is_list and not all(isinstance(each, str) for each in value))
    ):
        raise TypeError(
            f"`{name}` must be {in_words}. Received: {name}={value!r}. Expected what "
            f"the option --{name.replace('_', '-')} of `kerasdist run` takes."
        )
    if value is None:
        return []
    if value not in _KNOWN.get(name, (value,)):
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, _KNOWN[name]))}. Received: "
            f"{name}={value!r}. Expected one of these texts."
        )
    if name in _LEAST and value < _LEAST[name]:
        raise ValueError(
            f"`{name}` must be at least {_LEAST[name]}. Received: {name}={value!r}. "
            f"Expected an integer >= {_LEAST[name]}."
        )
    if isinstance(value, int):
        value = str(value)
    elif is_list and not isinstance(value, str):
        value = ",".join(value)
    dashes = "-" if name == "n" else "--"
    return [f"{dashes}{name.replace('_', '-')}", os.fsdecode(value)]


def _variables(env: Any) -> dict[str, str]:
    found: dict[Any, Any]
    found = dict(env or {}) if env is None or isinstance(env, Mapping) else {"": None}
    if not all(isinstance(text, str) for item in found.items() for text in item):
        raise TypeError(
            "`env` must be a mapping from names to texts. Received: "
            f"env={env!r}. Expected all of them as str."
        )
    wrong = sorted(
        name
        for name, value in found.items()
        if not name or "=" in name or "\0" in name + value
    )
    if wrong:
        raise ValueError(
            f"`env` has names or values that no environment can have. Received: "
            f"{wrong}. Expected names without '=' and without zero bytes."
        )
    return found


# The call that travels to all workers: a function, its arguments, and what they need.
#
# One file has two pickles. The first has plain data only: `sys.path` and the text of
# the notebook's cells. The second, the call itself, is loaded after these are in place.


def write_call(call: Callable[[], Any]) -> IO[bytes]:
    """Return an unnamed file with a call, for `load_call`.

    Raises:
        OSError: It can't be written.
        Exception: The call can't be pickled; classes raise what they like.
    """
    path = [os.path.abspath(each) for each in sys.path if isinstance(each, str)]
    with contextlib.ExitStack() as undo:
        file = undo.enter_context(tempfile.TemporaryFile())
        # What `load_call` puts in place.
        python_path = os.environ.get("PYTHONPATH")
        pickle.dump((path, list(sys.argv), python_path, _sources()), file)
        dump(call, file)
        file.flush()
        undo.pop_all()
    return file


def _sources() -> dict[str, list[str]]:
    """Return the lines of a notebook's cells, and of the script, by file name.

    Without them tracebacks of the workers have no lines, and `tf.function` can't
    convert Python's `if` and `while`.
    """
    found = {}
    # Cells are there as files that don't exist.
    for name, entry in list(linecache.cache.items()):
        if len(entry) > 1 and not os.path.exists(name):
            found[name] = list(entry[2])
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(script, str):
        found[script] = linecache.getlines(script)
    return found


def load_call(descriptor: int) -> Callable[[], Any]:
    """Prepare this interpreter for a call, and return it.

    Args:
        descriptor: Of the file. Others may read it at the same time.

    Raises:
        Exception: It can't be unpickled here; classes raise what they like.
    """
    # Processes that inherit a descriptor share its position; that of a map is its own.
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as file:
        path, arguments, python_path, sources = pickle.load(file)
        sys.path[:] = path + [each for each in sys.path if each not in path]
        sys.argv[:] = arguments
        # The caller's own, without what the launcher needs to find this package.
        if python_path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = python_path
        for name, lines in sources.items():
            if not os.path.exists(name):
                size = sum(map(len, lines))
                linecache.cache[name] = (size, None, lines, name)
        call: Callable[[], Any] = pickle.load(file)
        return call


def run(
    function: Callable[..., Any],
    n: int | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ps: int = 0,
    hosts: str | Sequence[str] | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    ssh: str | None = None,
    python: str | None = None,
    env: Mapping[str, str] | None = None,
    output: str = "chief",
    log_dir: str | os.PathLike[str] | None = None,
    bind: str = "none",
    malloc: str = "none",
    gpus: int | str = "auto",
    elastic: bool = False,
    min_workers: int | None = None,
    restarts: int | None = None,
) -> list[Any]:
    """Call a function in the workers of a new job, and return what each returns.

        def train(epochs):
            with kerasdist.RingStrategy().scope():
                model = build_model()
                model.compile("adam", "sparse_categorical_crossentropy")
            return model.fit(*load_data(), epochs=epochs).history

        histories = kerasdist.run(train, n=2, args=(5,))

    It starts `kerasdist run`, which has an option of the same name for each argument
    from `ps` on. The workers are new processes, also if TensorFlow is in use here. They
    have this process's environment, working folder and `sys.path`. The chief's output
    is shown here while it's written, in a notebook below the cell. Ctrl-C, or the
    notebook's interrupt, ends the workers, and so does the end of this process.

    The function and its arguments are pickled by cloudpickle: functions of a script, a
    notebook, lambdas and closures are sent as they are, with the global variables that
    they use; those of other modules are imported by the workers. Results are pickled,
    too; a `keras.callbacks.History` arrives without its model. Build the model and
    the strategy inside the function.

    Args:
        function: Is called in each worker, and in each server.
        n: Number of workers; with hosts by default as many as they have room for.
        args: Its positional arguments, a tuple.
        kwargs: Its keyword arguments.
        ps: Number of parameter servers.
        hosts: Hosts that ssh reaches, `"a:2,b:2"` or `["a:2", "b:2"]`. They need the
            same working folder, packages, and modules whose functions are called.
        hostfile: A file with a host in each line.
        ssh: With hosts: the command that connects.
        python: With hosts: the path of Python there.
        env: Variables for the workers, beside this process's.
        output: `"chief"` or `"all"`: whose output is shown.
        log_dir: Folder for the output of the others.
        bind: `"none"` or `"cores"`: whether each worker has its share of the cores.
        malloc: An allocator for the workers.
        gpus: `"auto"`: each worker has its share of its host's GPUs; a number: this
            many; `"all"`: each sees all of them; `"none"`: none.
        elastic: Whether the others go on when a worker is lost.
        min_workers: If elastic: the smallest number of workers that go on.
        restarts: If elastic: how many times lost workers are started again.

    Returns:
        The result of each worker, by rank. In the place of a worker that was lost while
        the others went on (an elastic job, asynchronous servers) is a `FunctionError`,
        which isn't raised.

    Raises:
        TypeError: The function can't be called with these arguments, or they can't be
            pickled, or an argument has another type. Nothing was started.
        OSError: The folder for temporary files is full. Nothing was started.
        ValueError: An argument can't be used. Nothing was started.
        ClusterError: The job can't be started with these options; or this process is
            itself a task of a job. Nothing was started.
        FunctionError: A worker failed, or its result can't be pickled. All processes of
            the job have ended. It names the rank and has the traceback there; its
            `__cause__` is the original exception, if that can be pickled.
        KeyboardInterrupt: Ctrl-C. All processes of the job have ended.
    """
    given = {name: value for name, value in locals().items() if name in _TYPES}
    _check_function(function, args, kwargs)
    on_hosts = hosts is not None or hostfile is not None
    if n is None and on_hosts:
        del given["n"]
    if not isinstance(elastic, bool):
        raise TypeError(f"`elastic` must be True or False. Received: {elastic!r}.")
    options = ["--elastic"] if elastic else []
    for name, value in given.items():
        options += _option(name, value)
    variables = _variables(env)
    for name in variables if on_hosts else ():
        options += ["-x", name]
    options += ["-m", "kerasdist.run_function.worker"]
    if not sys.executable:
        raise ValueError(
            "`kerasdist.run` starts new Pythons, but it is unknown where Python is. "
            "Received: an empty `sys.executable`. Expected the path of Python there."
        )
    if REPORT_VARIABLE in os.environ:
        raise ClusterError(
            "`kerasdist.run` was called in a task of a job, which it would start again "
            f"and again. Received: TF_CONFIG={os.environ.get('TF_CONFIG', '')!r} of "
            "that job. Expected to be called once, outside of the job: if the workers "
            'import the script, call it under `if __name__ == "__main__":`'
        )
    try:
        call = write_call(functools.partial(function, *args, **(kwargs or {})))
    except OSError:
        raise
    except Exception as error:  # classes raise what they like
        raise TypeError(
            f"The function or its arguments can't be pickled: {error}. Received: "
            f"function={_shown(function)}. Expected only what cloudpickle can pickle, "
            "also in the global variables that the function uses. Make the rest (open "
            "files, locks, strategies, datasets) inside the function."
        ) from error
    with contextlib.closing(Outcome()) as outcome:
        with call:
            environ = {**os.environ, **variables}
            launch(options, environ, call.fileno(), outcome)
        return _results(outcome, function)


def _shown(function: Any) -> str:
    name = getattr(function, "__qualname__", None)
    return repr(function) if name is None else f"{function.__module__}.{name}"


def _check_function(function: Any, args: Any, kwargs: Any) -> None:
    if not callable(function):
        raise TypeError(
            "`function` must be callable. Received: "
            f"function={function!r}. Expected a function, which isn't called yet."
        )
    if not isinstance(args, tuple):
        raise TypeError(
            "`args` must be a tuple of the function's arguments. Received: "
            f"args={args!r}. Expected `args=(value,)` for one argument."
        )
    if kwargs is not None and not (
        isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    ):
        raise TypeError(
            "`kwargs` must be a mapping from names to the function's arguments. "
            f"Received: kwargs={kwargs!r}. Expected a dictionary or None."
        )
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            "`function` must be a function that returns its result. Received: the "
            f"coroutine function {_shown(function)}. Expected a function that calls "
            "`asyncio.run`."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some written in C it isn't known
        return
    try:
        signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        raise TypeError(
            f"The function can't be called with these arguments: {error}. Received: "
            f"function={_shown(function)}{signature}, args={args!r}, "
            f"kwargs={kwargs!r}. Expected all of its arguments in `args` and `kwargs`."
        ) from None


def _results(outcome: Outcome, function: Any) -> list[Any]:
    """Return the workers' results by rank.

    Raises:
        ClusterError: Nothing was started.
        FunctionError: The job has failed.
    """
    if outcome.faults:
        raise ClusterError(
            "`kerasdist.run` can't start the job. "
            + "; ".join(outcome.faults)
            + ". The options are those of `kerasdist run`; nothing was started."
        )
    if outcome.code:
        raise _failure(outcome, function)
    results = []
    workers = [task for task in outcome.tasks if task.kind == "worker"]
    if not workers:
        raise FunctionError(
            "The launcher hasn't reported how the job ended, so its results are lost. "
            f"Received: exit code {outcome.code}. Its output has the reason."
        )
    for task in sorted(workers, key=lambda task: task.index):
        try:
            found = read_result(task.file)
        except Exception as error:  # classes raise what they like
            raise FunctionError(
                f"The result of rank {task.index} can't be loaded here: "
                f"{type(error).__name__}: {error}. Expected a result that needs only "
                "what this process can import.",
                task.index,
            ) from error
        if isinstance(found, tuple):
            results.append(found[0])
        elif task.code:
            results.append(_error(task, found, function))
        else:
            raise FunctionError(
                f"Rank {task.index} ended without a result. Received: exit code 0. "
                "Expected the function to return: it may have called `sys.exit` or "
                "`os._exit`.",
                task.index,
            )
    return results


def _failure(outcome: Outcome, function: Any) -> FunctionError:
    first = next((task for task in outcome.tasks if task.first), None)
    if first is None:
        how = f"exit code {outcome.code}"
        if outcome.code < 0:
            how = f"signal {signal.Signals(-outcome.code).name}"
        elif outcome.code > 128:
            how += f", as after signal {outcome.code - 128}"
        return FunctionError(
            f"The job was ended before the function returned in all workers. Received: "
            f"{how} of the launcher. Its output has the reason."
        )
    return _error(first, read_error(first.file), function)


# By `RemoteError.stage`.
_AT_STAGE = {
    "load": "The function can't be loaded in {name}: {message}. Received: function="
    "{function}. Expected only modules that the worker can import.",
    "call": "The function failed in {name}: {message}. Received: function={function}.",
    "result": "The result of {name} can't be pickled: {message}. Received: a result of "
    "type {result}. Expected what cloudpickle can pickle, for instance numbers, "
    "arrays, `history.history`, or the path of a model that the function has saved.",
}


def _error(task: TaskEnd, found: RemoteError | None, function: Any) -> FunctionError:
    """Return the error of a task, with the original one as its cause."""
    rank = task.index if task.kind == "worker" else None
    name = f"rank {task.index}" if rank is not None else f"server {task.index}"
    if found is None:
        return FunctionError(
            f"The process of {name} {task.ended}. Received: "
            f"function={_shown(function)}. Its output has the reason, if it wrote one.",
            rank,
        )
    text = _AT_STAGE[found.stage].format(
        name=name,
        message=found.message,
        function=_shown(function),
        result=found.result,
    )
    if found.traceback:
        text += f" Its traceback there:\n\n{found.traceback}"
    error = FunctionError(text.rstrip(), rank, found.traceback)
    error.__cause__ = found.exception()
    return error


# `kerasdist.predict(script)`: what `kerasdist predict` prints, as objects.


def predict(
    script: str | os.PathLike[str],
    *arguments: str,
    workers: Iterable[int],
    network: str | None = None,
    options: Iterable[str] = (),
) -> dict[int, Prediction]:
    """Simulate a script's steps with other numbers of workers, see docs/sizing.md.

    Another process runs the script up to its first `fit`. Its output goes to standard
    error.

    Args:
        script: The path of a Python script.
        arguments: The script's arguments.
        workers: Numbers of workers, each of which takes as many rows as the measured
            one.
        network: Bits per second between hosts, as "10G", or with a latency, as
            "1G,2ms". None: it's measured, which needs hosts in `options`.
        options: Further options of `kerasdist predict`, as `["-H", "alpha,beta"]`.

    Returns:
        For each number of workers the seconds of a step (`step_s`, `low`, `high`),
        `examples_per_s`, the `efficiency` and the `limit`.

    Raises:
        RuntimeError: An argument is wrong, or the script failed; the text has why.
    """
    command = [sys.executable, "-m", "kerasdist", "predict", "--json", *options]
    command += ["--workers", ",".join(map(str, workers))]
    command += [] if network is None else ["--network", network]
    done = subprocess.run(
        [*command, "--", os.fspath(script), *arguments],
        stdout=subprocess.PIPE,
        check=False,
    )
    document: dict[str, Any] = json.loads(done.stdout or "{}")
    if not document.get("ok"):
        error = document.get("error") or {}
        reason = error.get("message") or f"exit code {done.returncode}"
        raise RuntimeError(
            f"kerasdist predict failed. Received: script={os.fspath(script)!r}: "
            f"{reason}."
        )
    return from_json(document)
