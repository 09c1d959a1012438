"""The result of one check of `kerasdist doctor`.

A check returns findings and prints nothing. A fault of the machine or the settings is
a finding with a remedy, never an exception.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        level: `"ok"`, `"warn"` (works, but may surprise) or `"fault"` (a job can't
            run like this).
        text: What was found.
        remedy: The action to take; empty if none is needed.
    """

    level: Literal["ok", "warn", "fault"]
    text: str
    remedy: str = ""
