"""The detection of failures: a lost process is noticed, named and reported to all.

Control connections, heartbeats, the failure detector, and the reports to the launcher.
The exit code of a job is the launcher's matter (`kerasdist.cli.run.outcome`).
"""
