"""The variables that tell a task its place, beside `TF_CONFIG`."""

from __future__ import annotations

from kerasdist.cli.run.job import JobSpec, Task

# As other launchers (torchrun) name them. Strategies don't read them.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def place_variables(job: JobSpec, task: Task) -> dict[str, str]:
    """Return a task's variables: its rank, that on its host, and its GPUs.

    Sizes count all workers that the job may have: those that an elastic job may add,
    too. A server has no rank.

    Args:
        job: The job.
        task: One of its tasks, also one that is started again.
    """
    division = job.gpus.get(job.host_of(task))
    if task.is_server:
        return {} if division is None else division.environ(None)
    beside = job.workers_beside(task)
    local = beside.index(task)
    return {
        "RANK": str(task.index),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(len(beside)),
        **({} if division is None else division.environ(local)),
    }
