"""The agreement of workers on which of them continue a job, and from which step.

Pure state machines: no sockets, threads or clocks. `epochs` has the rules (quorum,
verdict, choice of the next members), `machine` the agreement, `attempt` one ballot of
it; `messages` go between machines, `events` between a machine and its caller. Frames,
timers and collectives aren't here.
"""
