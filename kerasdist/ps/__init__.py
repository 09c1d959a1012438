"""Parameter servers: tables, clocks, servers and clients. No TensorFlow, no Keras.

`layout` (the settings, and the assignment of variables' parts to servers) is shared by
both sides. Keras variables that are held by servers are in `strategies.asynchronous`.
"""

from kerasdist.ps.client.client import ServerClient
from kerasdist.ps.client.connect_servers import connect_servers, enter
from kerasdist.ps.client.remote_table import Change, Pulled, RemoteTable, Rows
from kerasdist.ps.layout import Layout, ServerSettings, Variable
from kerasdist.ps.membership import Event
from kerasdist.ps.server.handler import END
from kerasdist.ps.server.server import ParameterServer

__all__ = [
    "END",
    "Change",
    "Event",
    "Layout",
    "ParameterServer",
    "Pulled",
    "RemoteTable",
    "Rows",
    "ServerClient",
    "ServerSettings",
    "Variable",
    "connect_servers",
    "enter",
]
