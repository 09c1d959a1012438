"""Environment variables for a report that others read: secrets are hidden."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_PREFIXES = (
    *("KERASDIST_", "KERAS_", "TF_", "XLA_", "CUDA_", "NVIDIA_", "NCCL_", "OMP_"),
    *("SLURM_", "OMPI_", "PMI_", "PMIX_", "I_MPI_", "MPI_", "PRTE_", "PYTHON"),
)
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_ARENA_MAX")
_WORDS = (
    r"secret|token|passw|passphrase|credential|private|cookie|jwt"
    r"|(?:^|[_-])(?:auth|key)(?:$|[_-])|api_?key"
)
_IS_SECRET = re.compile(_WORDS, re.IGNORECASE)
# "name=value" and "name": "value" inside of a value; user and password of an address.
_INSIDE = re.compile(
    rf"""([\w-]*(?:{_WORDS})[\w-]*["']?\s*[=:]\s*)"""
    r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^\s,;&"'}]+)""",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(://)[^/\s@]+@")
_LEAST = 6  # characters: a shorter secret could be a part of any word


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter for a job, by name, without secrets."""
    return {
        name: HIDDEN if value and _IS_SECRET.search(name) else _without(value)
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES) or name in _NAMES
    }


def hide_secrets(value: Any, environ: Mapping[str, str]) -> Any:
    """Return a report without the values of the environment's secrets.

    Args:
        value: Text, or lists and dictionaries with it.
        environ: The environment: all of it, not only what is shown.
    """
    # A path isn't a secret, and is a part of many others.
    secrets = sorted(
        {
            text
            for name, text in environ.items()
            if _IS_SECRET.search(name)
            and len(text) >= _LEAST
            and not text.startswith("/")
        },
        key=len,
        reverse=True,
    )
    return _each_text(value, lambda text: _replaced(text, secrets))


def _replaced(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _without_inside(text)


def _without(text: str) -> str:
    """Return a variable's value with the secrets in it hidden."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return json.dumps(_without_keys(json.loads(text)))
        except (ValueError, RecursionError):
            pass  # it isn't JSON
    return _without_inside(text)


def _without_inside(text: str) -> str:
    return _IN_ADDRESS.sub(rf"\1{HIDDEN}@", _INSIDE.sub(rf"\1{HIDDEN}", text))


def _without_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: HIDDEN if _IS_SECRET.search(key) else _without_keys(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_without_keys(each) for each in value]
    return _without(value) if isinstance(value, str) else value


def _each_text(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: _each_text(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_each_text(each, change) for each in value]
    return change(value) if isinstance(value, str) else value
