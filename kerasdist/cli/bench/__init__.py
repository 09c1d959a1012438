"""The command `kerasdist bench`: what a step of a script's own `fit` costs, by parts.

| module | |
| --- | --- |
| `command` | the command and its options |
| `worker` | what each worker runs: the script, with its first `fit` measured |
"""
