"""`kerasdist.run`: a function in the workers of a job, from Python or a notebook."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kerasdist.errors import ClusterError, FunctionError
from kerasdist.functions.call import Call, write_call
from kerasdist.functions.launcher import Outcome, TaskEnd, launch
from kerasdist.functions.options import options_of
from kerasdist.functions.results import RemoteError, read_error, read_result
from kerasdist.transport.liveness.launcher_pipe import REPORT_VARIABLE


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
    _check_function(function, args, kwargs)
    options, environ = options_of(
        n,
        ps=ps,
        hosts=hosts,
        hostfile=hostfile,
        ssh=ssh,
        python=python,
        env=env,
        output=output,
        log_dir=log_dir,
        bind=bind,
        malloc=malloc,
        gpus=gpus,
        elastic=elastic,
        min_workers=min_workers,
        restarts=restarts,
    )
    if REPORT_VARIABLE in os.environ:
        raise ClusterError(
            "`kerasdist.run` was called in a task of a job, which it would start again "
            f"and again. Received: TF_CONFIG={os.environ.get('TF_CONFIG', '')!r} of "
            "that job. Expected to be called once, outside of the job: if the workers "
            'import the script, call it under `if __name__ == "__main__":`'
        )
    try:
        call = write_call(Call(function, args, dict(kwargs or {})))
    except OSError:
        raise
    except Exception as error:  # classes raise what they like
        raise TypeError(
            f"The function or its arguments can't be pickled: {error}. Received: "
            f"function={_shown(function)}. Expected only what cloudpickle can pickle, "
            "also in the global variables that the function uses. Make the rest (open "
            "files, locks, strategies, datasets) inside the function."
        ) from error
    with call:
        outcome = launch(options, environ, call.fileno())
    try:
        return _results(outcome, function)
    finally:
        outcome.close()


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
    begin = {
        "load": f"The function can't be loaded in {name}",
        "call": f"The function failed in {name}",
        "result": f"The result of {name} can't be pickled",
    }[found.stage]
    advice = {
        "load": f"Received: function={_shown(function)}. Expected only modules that "
        "the worker can import.",
        "call": f"Received: function={_shown(function)}.",
        "result": f"Received: a result of type {found.result}. Expected what "
        "cloudpickle can pickle, for instance numbers, arrays, `history.history`, or "
        "the path of a model that the function has saved.",
    }[found.stage]
    text = f" Its traceback there:\n\n{found.traceback}" if found.traceback else ""
    error = FunctionError(
        f"{begin}: {found.message}. {advice}{text}".rstrip(), rank, found.traceback
    )
    error.__cause__ = found.exception()
    return error
