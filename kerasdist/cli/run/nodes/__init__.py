"""`kerasdist run --nnodes 2 --rendezvous a:29400`: a launcher on each of several hosts.

Here: their options, and the rendezvous at which they exchange the addresses of their
tasks. Not here: the tasks, which each launcher runs as those of a job of its own.
"""
