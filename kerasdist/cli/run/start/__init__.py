"""The start of a job: what `kerasdist run` does once, before it watches the tasks.

Here: the check of the script, the log folder and environment of all tasks, their
cores, and the fork of the supervisor. Not here: the start of single tasks, which the
supervisor repeats for those that are lost.
"""
