"""Parameter servers: tables, clocks, servers and clients. No TensorFlow, no Keras."""

from kerasdist.server.client import ServerClient
from kerasdist.server.connect import connect_servers
from kerasdist.server.crew import Event
from kerasdist.server.dealer import END
from kerasdist.server.gate import enter
from kerasdist.server.layout import Layout, Variable
from kerasdist.server.remote import Change, Pulled, RemoteTable, Rows
from kerasdist.server.service import ParameterServer
from kerasdist.server.settings import ServerSettings

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
