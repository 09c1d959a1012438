"""Numbers of rows: batches that can't be divided evenly."""

from __future__ import annotations

from cases.training import Numbers, Scope, case, data, train


@case
def uneven_last_batch(scope: Scope) -> Numbers:
    return train(scope)


@case
def fewer_rows_than_replicas(scope: Scope) -> Numbers:
    return train(scope, arrays=data(17), fit={"batch_size": 4})


@case
def one_row_at_a_time(scope: Scope) -> Numbers:
    return train(scope, arrays=data(5), fit={"batch_size": 1})


@case
def first_batch_uneven(scope: Scope) -> Numbers:
    return train(scope, arrays=data(3), fit={"batch_size": 3})


@case
def even_batches(scope: Scope) -> Numbers:
    return train(scope, arrays=data(48), fit={"batch_size": 12})
