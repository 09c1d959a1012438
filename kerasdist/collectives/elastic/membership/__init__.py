"""The agreement of a worker with the others on the members of the job.

`lines` carry messages and questions between processes, and `startup` is what is known
while the job starts. `agreement` runs the machine of `kerasdist.transport.membership`,
which decides. Groups and collectives aren't here.
"""
