"""Messages for users about data that differ between the workers."""

from __future__ import annotations

_SEED = (
    "If each worker's data are its own part, give the strategy shard='off'. If all "
    "workers should have the same data, seed what makes them "
    "(`keras.utils.set_random_seed` with the same number on all workers, before the "
    "data are made)"
)
REMEDIES = f"{_SEED}, or give the strategy data='chief': then the chief's are used."
_ELASTIC_REMEDIES = (
    f"{_SEED}. With elastic=True the chief's data can't be used on all workers: "
    "the chief may be lost."
)


def with_remedies(what: str, received: str) -> ValueError:
    """Return an error about data that differ.

    Args:
        what: The fault, without a full stop.
        received: The facts that were found.
    """
    return ValueError(f"{what}. Received: {received}. {REMEDIES}")


def other_forms(name: str, forms: dict[int, str]) -> ValueError:
    """Return the error about data of different structures, by rank."""
    every = "; ".join(f"rank {rank}: {form}" for rank, form in forms.items())
    return with_remedies(f"The workers were given {name} of different forms", every)


def own_parts(name: str, how: str) -> ValueError:
    """Return the error about data that are each worker's own part."""
    return with_remedies(
        f"The workers were given different {name}, which look like each worker's own "
        "part of the data; without shard='off' all workers must be given all data, of "
        "which each takes its rows",
        how,
    )


def strangers(name: str, found: str) -> ValueError:
    """Return the error about data that can't be classified."""
    return with_remedies(
        f"The workers were given different {name}, and it isn't known whether they are "
        "each worker's own part, or should be the same",
        found,
    )


def used(name: str, why: str, cost: str) -> str:
    """Return the line for the user about the use of the chief's data."""
    return (
        f"kerasdist: the chief's {name} are used on all workers ({why}); {cost}. With "
        "the same seed on all workers (keras.utils.set_random_seed) each reads its own."
    )


def in_elastic_job(error: ValueError) -> ValueError:
    """Return an error about data that differ with the remedies of an elastic job."""
    text = str(error)
    if REMEDIES not in text:
        return error
    return type(error)(text.replace(REMEDIES, _ELASTIC_REMEDIES))
