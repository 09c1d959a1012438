"""Jobs with parameter servers, in threads of one process or in processes, for tests.

with Servers(workers=2, servers=1, mode="async") as job:
    tables = job.run(lambda client: client.open_table(variables, values))
"""

import json
import textwrap
import threading
from typing import Any

from groups import Ranks, addresses_of, close_all, cluster_on, in_threads
from kerasdist.cluster import Cluster
from kerasdist.parameter_server import (
    ParameterServer,
    ServerClient,
    ServerSettings,
    connect_servers,
)
from kerasdist.transport.deadline import Timeouts
from workers import Workers

# What connects workers and servers: the contract tests run on all of them.
KINDS = ("tcp", "shared_memory", "memory")
SECONDS = Timeouts(startup=60, collective=60, heartbeat=30)


def server_place(workers: Any, servers: Any, index: int) -> Cluster:
    return Cluster(
        rank=None,
        size=len(workers),
        workers=tuple(workers),
        servers=tuple(servers),
        task_type="ps",
        task_index=index,
    )


class Servers(Ranks):
    """A job: servers and workers, each in threads. Use it in a `with` statement."""

    members = property(lambda self: self.clients)

    def __init__(
        self,
        workers: int = 2,
        servers: int = 1,
        *,
        kind: str = "shared_memory",
        timeouts: Timeouts = SECONDS,
        connected: bool = True,
        **settings: Any,
    ) -> None:
        self.settings = ServerSettings(**{"mode": "async", **settings})
        self.timeouts = timeouts
        self.kind = "shared_memory" if kind == "memory" else kind
        self.size = workers
        self.clients: list[ServerClient] = []
        self.servers: list[ParameterServer] = []
        self.layouts: list[Any] = []
        self.splits: list[Any] = []
        self.ends: dict[int, Any] = {}
        self.threads: list[threading.Thread] = []
        self.workers: list[str] = []
        self.addresses: list[str] = []
        if kind == "memory":
            place = Cluster(rank=0, size=1)
            self.clients = [connect_servers(place, self.settings, timeouts=timeouts)]
            return
        addresses = addresses_of(workers + servers)
        self.workers, self.addresses = addresses[:workers], addresses[workers:]
        for index in range(servers):
            self.start_server(index)
        if connected:
            self.clients = in_threads(workers, self.connect)

    def start_server(self, index: int) -> ParameterServer:
        server = ParameterServer(
            server_place(self.workers, self.addresses, index),
            self.settings,
            timeouts=self.timeouts,
        )
        server.handler.on_split = self.splits.append
        server.handler.tables.on_table = self.layouts.append
        self.servers[index:] = [server, *self.servers[index + 1 :]]

        def serve() -> None:
            try:
                self.ends[index] = server.serve()
            except Exception as error:
                self.ends[index] = error

        thread = threading.Thread(target=serve, name=f"server {index}", daemon=True)
        thread.start()
        self.threads.append(thread)
        return server

    def connect(self, rank: int, **options: Any) -> ServerClient:
        options.setdefault("transport", "auto" if self.kind != "tcp" else "tcp")
        place = cluster_on(self.workers, rank, self.addresses)
        settings = options.pop("settings", self.settings)
        return connect_servers(place, settings, timeouts=self.timeouts, **options)

    def join(self, timeout: float = 60.0) -> None:
        for thread in self.threads:
            thread.join(timeout)
        stuck = [t.name for t in self.threads if t.is_alive()]
        if stuck:
            raise TimeoutError(f"{stuck} still ran after {timeout} s.")

    def close(self) -> None:
        if self.clients:
            close_all(self.clients)
        else:
            for server in self.servers:
                server.close()
        try:
            self.join()
        finally:
            for server in self.servers:
                server.close()


# What tests of processes run in each of them. `work(client, table, say)` is the test's.
_SCRIPT = """
import json, os, signal, sys, time
import numpy as np
from kerasdist import errors
from kerasdist.cluster import resolve
from kerasdist.parameter_server import *
from kerasdist.transport.deadline import Timeouts

options = json.loads(os.environ["OPTIONS"])
settings = ServerSettings(**options["settings"])
timeouts = Timeouts(**options["timeouts"])
cluster = resolve()
VARIABLES = [
    Variable(name="slots", shape=(cluster.size,)),
    Variable(name="rows", shape=(50, 2), sparse=True),
]

def say(text, value=None):
    line = text if value is None else f"{text} {json.dumps(value)}"
    sys.stdout.write(line + "\\n")  # one write: there are threads that log

def steps(table, count, pause=0.01):
    one = np.zeros(cluster.size, "float32")
    one[cluster.rank] = 1
    for _ in range(count):
        pulled = table.push_pull(
            [one, Rows(np.array([cluster.rank]), np.ones((1, 2), "float32"))])
        time.sleep(pause)  # the test's own process needs the cores, too
    return pulled

%s

try:
    if cluster.task_type == "ps":
        server = ParameterServer(cluster, settings, timeouts=timeouts)
        say("LISTENING")
        say("RESULT", ["ok", server.serve()])
    else:
        client = connect_servers(
            cluster, settings, timeouts=timeouts, transport=options["transport"])
        table = None
        if settings.mode == "async":
            table = client.open_table(
                VARIABLES, [np.zeros(v.shape, "float32") for v in VARIABLES])
        result = work(client, table)
        client.close()
        say("RESULT", ["ok", result])
except errors.KerasDistError as error:
    fields = {k: v for k, v in vars(error).items() if isinstance(v, (int, str))}
    say("RESULT", [type(error).__name__, str(error), fields])
"""


class ServerProcesses(Workers):
    """Worker and server processes; ranks from `workers` on are the servers."""

    def __init__(
        self,
        work: str,
        workers: int,
        servers: int = 1,
        *,
        timeouts: dict[str, float] | None = None,
        transport: str = "auto",
        deadline: float = 120.0,
        **settings: Any,
    ) -> None:
        limits = {"startup": 60.0, "collective": 60.0, "heartbeat": 30.0}
        options = {
            "settings": {"mode": "async", **settings},
            "timeouts": {**limits, **(timeouts or {})},
            "transport": transport,
        }
        script = _SCRIPT % textwrap.dedent(work)
        super().__init__(
            script,
            workers,
            servers=servers,
            env={"OPTIONS": json.dumps(options)},
            deadline=deadline,
            handover=False,
        )

    def going(self) -> None:
        self.wait_for_lines("GOING")
