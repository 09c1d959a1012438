"""The rendezvous of a job's processes: listen, dial, hello, roster.

A session is open once every rank has all the connections that it needs. They are
supervised in `transport.liveness`.
"""
