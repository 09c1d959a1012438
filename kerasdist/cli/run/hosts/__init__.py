"""`kerasdist run -H a:2,b:2`: a job on several hosts, which ssh reaches.

Here: the hosts, their check before the start, and one process on each side of an ssh
connection for each task. Not here: the watch of tasks and the job's outcome, which see
a task of another host as the process on this side.
"""
