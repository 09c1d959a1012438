"""The agreement of workers on which of them continue a job, and with which step.

Pure state machines: no sockets, threads or clocks. `epochs` has the rules (quorum,
verdict, choice of the next members), `messages` what goes in and out of a machine, and
`machine` the agreement itself. Frames, timers and collectives are the callers'.
"""
