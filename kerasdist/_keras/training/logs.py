"""Logs of an epoch, of any structure, the same on all workers.

`train_step` may return anything. Keras replaces it by the results of the model's
metrics if the names are the same; else the logs are those of the last step, on this
worker's rows. Each number in them, however deeply nested, becomes one of:

    1. a metric's result   that of the state of all workers, as in one process
    2. for other numbers   the mean over the replicas, weighted by the rows that each
                           had in its last step

A number is taken for a metric's result if it equals the result of this replica's state
on all workers that had rows, or has the same name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.context import current
from kerasdist._keras.global_batch.losses import recorded
from kerasdist._keras.protocols import KerasHooks
from kerasdist._tf.variables import LAST_LOGS, of_tensorflow
from kerasdist.transport import log

# The path of a number in logs: names, from outside to inside.
_Path = tuple[str, ...]
# At most this many numbers of an array in logs are sent for each worker.
_MOST = 4096


class LastLogs:
    """The logs of each replica's last step on this worker, and that step's rows.

    Attributes:
        reported: Whether the user was informed that some of them aren't metrics'
            results.
    """

    def __init__(self) -> None:
        self.reported = False
        self._paths: list[tuple[_Path, tuple[int, ...]]] = []
        self._kept: dict[int, Any] = {}

    def keep(self, logs: Any, rows: Any) -> None:
        """Keep a step's logs, in replica context."""
        found: dict[_Path, Any] = {}
        for path, given in _leaves(logs):
            if _is_known(given):
                found[path] = recorded(tf.convert_to_tensor(given))
        if not found:
            return
        self._paths = [(path, tuple(v.shape)) for path, v in found.items()]
        flat = [tf.reshape(tf.cast(v, tf.float64), [-1]) for v in found.values()]
        numbers = tf.concat([[tf.cast(rows, tf.float64)], *flat], 0)
        replica = _tf.local_replica_id()
        kept = self._kept.get(replica)
        if kept is None or kept.shape != numbers.shape:
            zeros = np.zeros(numbers.shape, np.float64)
            kept = self._kept[replica] = _tf.own_variable(zeros, tf.float64)
        with tf.device(kept.device):
            kept.assign(numbers)

    def values(self) -> tuple[float, bool, dict[_Path, Any]]:
        """Return the last step's rows, whether all replicas had some, and the means."""
        kept = [np.asarray(variable) for variable in self._kept.values()]
        if not kept:
            return 0.0, False, {}
        weights = np.array([numbers[0] for numbers in kept])
        total = float(weights.sum())
        numbers = np.stack([numbers[1:] for numbers in kept])
        # A replica without rows ran on made-up ones.
        present = numbers[weights > 0] if total else numbers
        shares = weights[weights > 0] / total if total else np.full(len(kept), 0.0)
        mean = shares @ present
        ends = np.cumsum([int(np.prod(shape)) for _, shape in self._paths])
        parts = np.split(mean, ends[:-1])
        found = {
            path: part.reshape(shape)
            for (path, shape), part in zip(self._paths, parts, strict=True)
        }
        return total, bool((weights > 0).all()), found


def keeping(
    step_function: Callable[[Any], Any],
) -> LastLogs | None:
    """Return an object that keeps a step's logs; None for Keras's own steps.

    The logs of Keras's own steps are results of metrics.
    """
    function = getattr(step_function, "__func__", step_function)
    own = (keras.Model.train_step, keras.Model.test_step)
    return None if function in own else LastLogs()


def numbers_of(logs: Any) -> Any:
    """Return logs with a tensor in place of each variable; all workers call it alike.

    Keras would read variables later, and some workers only.
    """
    return _map(tf.convert_to_tensor, logs, only_variables=True)


def whole_logs(trainer: Any, hooks: KerasHooks, logs: Any) -> dict[str, Any]:
    """Reduce logs over the workers; all workers call it at the same point.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        logs: The logs of the last step, a dictionary that may be nested; empty on a
            worker that took none.

    Returns:
        The logs, the same on all workers.
    """
    # This worker's numbers of variables: another one may have no logs.
    logs = _map(_mean_of_replicas, logs, only_variables=True)
    function = trainer.test_function if current.evaluating else trainer.train_function
    last: LastLogs | None = LAST_LOGS.get(inspect.unwrap(function))
    rows, complete, kept = (0.0, False, {}) if last is None else last.values()
    mine = {
        path: np.asarray(value, np.float64)
        for path, value in _leaves(logs)
        if _is_known(value)
    }
    results = _results(trainer, local=True) if mine else {}
    report = {
        "rows": rows if kept or not mine else 1.0,
        # Without rows the step's logs are computed of zeros, but metrics' state isn't.
        "complete": complete,
        "logs": [
            [
                list(path),
                kept.get(path, value).tolist(),
                [
                    list(where)
                    for where, result in results.items()
                    if _same(value, result)
                ],
            ]
            for path, value in mine.items()
        ],
    }
    every = [each for _, each in sorted(hooks.consensus.facts(report).items())]
    return _put_together(trainer, hooks, logs, every, last)


def _put_together(
    trainer: Any, hooks: KerasHooks, logs: Any, every: list[Any], last: LastLogs | None
) -> dict[str, Any]:
    found: dict[_Path, list[tuple[float, bool, Any, set[_Path]]]] = {}
    for report in every:
        for path, value, equal in report["logs"]:
            places = {tuple(where) for where in equal}
            entry = report["rows"], report["complete"], np.asarray(value), places
            found.setdefault(tuple(path), []).append(entry)
    results: dict[_Path, Any] = {}
    if found:
        results = _results(trainer, local=False)
    whole = logs if isinstance(logs, dict) else {}
    guessed = []
    for path, entries in found.items():
        metric = _metric_of(path, entries, results)
        if metric is not None:
            value = results[metric]
        else:
            value, differs = _mean(entries)
            if differs:
                guessed.append("/".join(path))
        _put(whole, path, value)
    if guessed and last is not None and not last.reported:
        last.reported = True
        if hooks.workers.rank == 0:
            _inform(guessed)
    return whole


def _inform(names: list[str]) -> None:
    log.info(
        "kerasdist: the logs %s aren't results of the model's metrics, "
        "so you see the mean over the workers' last steps, weighted by rows: for a "
        "mean over rows, the number of one process. To report a whole epoch, return "
        "the result of a metric that is an attribute of the model, for instance a "
        "`keras.metrics.Mean`.",
        sorted(names),
    )


def _metric_of(
    path: _Path,
    entries: list[tuple[float, bool, Any, set[_Path]]],
    results: Mapping[_Path, Any],
) -> _Path | None:
    """Return the path of the metric whose result a number is, or None."""
    sets = [places for rows, complete, _, places in entries if rows and complete]
    if not sets:
        # No worker had rows on all replicas: compare only the names.
        return path if path in results else None
    common = set.intersection(*sets) & set(results)
    if path in common:
        return path
    same = [where for where in results if where in common and where[-1] == path[-1]]
    return next(iter([*same, *(where for where in results if where in common)]), None)


def _mean(entries: list[tuple[float, bool, Any, set[_Path]]]) -> tuple[Any, bool]:
    """Return the mean weighted by rows, and whether the workers' values differ."""
    some = [(rows, value) for rows, _, value, _ in entries if rows]
    if not some or any(value.shape != some[0][1].shape for _, value in some):
        return entries[0][2], False
    total = sum(rows for rows, _ in some)
    mean = sum(value * (rows / total) for rows, value in some)
    differs = any(not _same(value, some[0][1]) for _, value in some)
    return (mean if differs else some[0][1]), differs


def _results(trainer: Any, *, local: bool) -> dict[_Path, Any]:
    """Return the results of the model's metrics, of this worker's state or of all.

    Several results of one metric are found under its name, and each by itself.
    """
    found: dict[_Path, Any] = {}
    for metric in trainer.metrics:
        try:
            if local:
                result = _of_this_worker(trainer, metric)
            else:
                result = numbers_of(metric.result())
        except ValueError:
            continue  # it isn't built
        for path, value in _leaves({metric.name: result}):
            if _is_known(value):
                found[path] = np.asarray(value, np.float64)
                if len(path) > 1:
                    found.setdefault(path[1:], found[path])
    return found


def _of_this_worker(trainer: Any, metric: Any) -> Any:
    """Return the mean of the replicas' own results, as in Keras's logs."""
    return _map(_mean_of_replicas, trainer.distribute_strategy.run(metric.result))


def _mean_of_replicas(value: Any) -> Any:
    parts = _tf.local_results(of_tensorflow(value))
    return np.mean([np.asarray(part) for part in parts], axis=0)


def _map(
    function: Callable[[Any], Any], logs: Any, *, only_variables: bool = False
) -> Any:
    """Return a copy of logs, with the results of a function for what is in them."""
    if isinstance(logs, Mapping):
        return {
            name: _map(function, value, only_variables=only_variables)
            for name, value in logs.items()
        }
    if only_variables and not isinstance(logs, (keras.Variable, tf.Variable)):
        return logs
    return function(logs)


def _leaves(logs: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    if isinstance(logs, Mapping):
        for name, value in logs.items():
            yield from _leaves(value, (*path, str(name)))
    elif path:
        yield path, logs


def _is_known(value: Any) -> bool:
    """Return whether a value is a number or a small array of numbers."""
    if not tf.is_tensor(value):
        value = np.asarray(value)
        return value.dtype.kind in "fiub" and value.size <= _MOST
    # Also of a Keras variable, which has its own kinds of both.
    size = tf.TensorShape(value.shape).num_elements()
    dtype = tf.as_dtype(value.dtype)
    numbers = dtype.is_floating or dtype.is_integer or dtype == tf.bool
    return numbers and size is not None and size <= _MOST


def _same(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return one.shape == other.shape and bool(
        np.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True)
    )


def _put(logs: dict[str, Any], path: _Path, value: Any) -> None:
    *outer, name = path
    for key in outer:
        logs = logs.setdefault(key, {})
    logs[name] = float(value) if np.ndim(value) == 0 else value
