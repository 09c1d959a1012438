"""One thing that `kerasdist doctor` has looked at.

What looks returns findings and prints nothing. It never raises because of what it
finds: what is wrong with the machine or the settings is a finding with a remedy.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

__all__ = ["Finding"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: `"ok"`, `"warn"` (works, but may surprise) or `"fault"` (a job can't
            run like this).
        text: What was found.
        remedy: What to do; empty if nothing needs to be done.
    """

    level: Literal["ok", "warn", "fault"]
    text: str
    remedy: str = ""
