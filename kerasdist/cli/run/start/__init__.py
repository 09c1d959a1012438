"""What `kerasdist run` does once, between its options and the watch of the tasks.

Here: the check of the script, the log folder and environment of all tasks, their
cores, and the fork of the supervisor. Not here: the start of single tasks, which the
supervisor repeats for those that are lost.
"""
