"""What the benchmarks share: processes that take orders, environment, tables, plots.

    with Driver() as driver:
        team = driver.start("tcp", lambda rank: [python, "player.py", ...], 2)
        answers = team.order({"bytes": 1024})      # one answer per rank

The processes of all columns of a table live side by side and wait, each at a socket,
until it is their turn: so all columns are measured in the same run, in turns. Only
the standard library is needed here: peers have environments of their own. Figures
are medians; times are in seconds.
"""

from common.digits import digits_data, digits_model
from common.figures import fit_line, human_bytes, median, plot, table, timed
from common.links import bytes_sent, delayed, make_hosts, shape, start_on_hosts
from common.places import ROOT, cluster_env, free_ports, quiet_env
from common.processes import Driver, Ended, Team, serve
from common.report import Report, arguments
from common.strategies import is_async, make_strategy, servers

__all__ = [
    "ROOT",
    "Driver",
    "Ended",
    "Report",
    "Team",
    "arguments",
    "bytes_sent",
    "cluster_env",
    "delayed",
    "digits_data",
    "digits_model",
    "fit_line",
    "free_ports",
    "human_bytes",
    "is_async",
    "make_hosts",
    "make_strategy",
    "median",
    "plot",
    "quiet_env",
    "serve",
    "servers",
    "shape",
    "start_on_hosts",
    "table",
    "timed",
]
