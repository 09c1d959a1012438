"""How the processes of a job find each other: listen, dial, hello, roster.

A session is open once every rank has all the connections that it needs. What happens
to them afterwards is in `transport.liveness`.
"""
