"""The launcher's side of `kerasdist.run(function)`.

Here: its start by a process that isn't a shell, the files for the call and the results,
and the report about the job's end. Not here: the caller, `kerasdist.functions`.
"""
