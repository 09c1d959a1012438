"""How the end of a process is noticed, named and passed on to all others.

Control connections, heartbeats, the failure detector, and the last message to the
launcher. The exit code of a job is the launcher's matter (`kerasdist.cli.run`).
"""
