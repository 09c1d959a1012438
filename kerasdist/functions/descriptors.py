"""The variables that name inherited descriptors: of the call, the results, the outcome.

    1. caller     gives the launcher the file with the call, and a socket
    2. launcher   gives each task that file, and an unnamed one for its result
    3. launcher   sends through the socket how each task ended, and its result's file

Nothing has a name that another process could open; to other hosts both files are sent
through ssh.
"""

from __future__ import annotations

CALL_VARIABLE = "KERASDIST_CALL_FD"
RESULT_VARIABLE = "KERASDIST_RESULT_FD"
OUTCOME_VARIABLE = "KERASDIST_OUTCOME_FD"
