"""The agreement of workers on which of them continue a job, and from which step.

Pure state machines: no sockets, threads or clocks. `machine` has the agreement and
`attempt` one ballot of it; `events` has the rules (quorum, verdict, choice of the next
members), the messages between machines, and the events between a machine and its
caller. Frames, timers and collectives aren't here.
"""
