"""Parameter servers: tables, clocks, servers and clients. No TensorFlow, no Keras.

`layout` (the settings, and the assignment of variables' parts to servers) is shared by
both sides. Keras variables that are held by servers are in `strategies.asynchronous`.
"""

from kerasdist.parameter_server.client.client import ServerClient
from kerasdist.parameter_server.client.connect_servers import connect_servers
from kerasdist.parameter_server.client.remote_table import (
    Change,
    Pulled,
    RemoteTable,
    Rows,
)
from kerasdist.parameter_server.layout import Layout, ServerSettings, Variable
from kerasdist.parameter_server.membership import Event
from kerasdist.parameter_server.server.handler import END
from kerasdist.parameter_server.server.server import ParameterServer

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
]
