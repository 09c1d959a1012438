"""The options of `kerasdist run` for the arguments of `kerasdist.run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_WORKER = "kerasdist.functions.worker"
_CHOICES = {"output": ("chief", "all"), "bind": ("none", "cores")}


def options_of(
    n: int | None,
    *,
    ps: int,
    hosts: str | Sequence[str] | None,
    env: Mapping[str, str] | None,
    gpus: int | str,
    elastic: bool,
    min_workers: int | None,
    restarts: int | None,
    **texts: Any,
) -> tuple[list[str], dict[str, str]]:
    """Return what follows `kerasdist run`, and its environment.

    The launcher checks the rest: whether hosts can be parsed, for instance.

    Args:
        n: See `kerasdist.run`, also for the next ones.
        ps: Number of servers.
        hosts: The hosts.
        env: Further variables.
        gpus: The GPUs of each worker.
        elastic: Whether the job is elastic.
        min_workers: The smallest number of workers.
        restarts: The number of restarts.
        **texts: Options whose values are texts or paths; None: not given.

    Raises:
        TypeError: A value has another type.
        ValueError: A value can't be used.
    """
    on_hosts = hosts is not None or texts["hostfile"] is not None
    if not (n is None and on_hosts):
        _check_number("n", n, 1)
    _check_number("ps", ps, 0)
    for name, known in _CHOICES.items():
        if texts[name] not in known:
            raise ValueError(
                f"`{name}` must be one of {', '.join(map(repr, known))}. Received: "
                f"{name}={texts[name]!r}. Expected one of these texts."
            )
    given: dict[str, str | None] = {
        "n": None if n is None else str(n),
        "ps": str(ps),
        "hosts": _hosts(hosts),
        "gpus": _gpus(gpus),
        **{name: _text(name, value) for name, value in texts.items()},
    }
    if not isinstance(elastic, bool):
        raise TypeError(f"`elastic` must be True or False. Received: {elastic!r}.")
    for name, count in (("min_workers", min_workers), ("restarts", restarts)):
        if count is not None:
            _check_number(name, count, 0)
            given[name] = str(count)
    options = ["--elastic"] if elastic else []
    for name, value in given.items():
        if value is None:
            continue
        option = "-n" if name == "n" else f"--{name.replace('_', '-')}"
        options += [option, value]
    environ = dict(os.environ)
    for name, text in _variables(env).items():
        environ[name] = text
        if on_hosts:
            options += ["-x", name]
    if not sys.executable:
        raise ValueError(
            "`kerasdist.run` starts new Pythons, but it is unknown where Python is. "
            "Received: an empty `sys.executable`. Expected the path of Python there."
        )
    return [*options, "-m", _WORKER], environ


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"`{name}` must be an integer. Received: {name}={value!r}. Expected an "
            f"integer >= {least}."
        )
    if value < least:
        raise ValueError(
            f"`{name}` must be at least {least}. Received: {name}={value!r}. Expected "
            f"an integer >= {least}."
        )


def _text(name: str, value: Any) -> str | None:
    try:
        return None if value is None else os.fsdecode(value)
    except TypeError:
        raise TypeError(
            f"`{name}` must be a text. Received: {name}={value!r}. Expected what the "
            f"option of `kerasdist run` takes."
        ) from None


def _gpus(gpus: Any) -> str:
    if isinstance(gpus, bool) or not isinstance(gpus, int | str):
        raise TypeError(
            f"`gpus` must be a text or an integer. Received: gpus={gpus!r}. Expected "
            "'auto', 'all', 'none' or a number of GPUs for each worker."
        )
    return str(gpus)


def _hosts(hosts: Any) -> str | None:
    if hosts is None or isinstance(hosts, str):
        return hosts
    try:
        return ",".join(hosts)
    except TypeError:
        raise TypeError(
            "`hosts` must be a text or a list of texts. Received: "
            f'hosts={hosts!r}. Expected "a:2,b:2" or ["a:2", "b:2"].'
        ) from None


def _variables(env: Any) -> dict[str, str]:
    found = dict(env or {}) if env is None or isinstance(env, Mapping) else None
    if found is None or not all(
        isinstance(text, str) for item in found.items() for text in item
    ):
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
