"""Facts about objects of others are known by identity, for as long as those exist."""

from __future__ import annotations

import gc
import weakref

from kerasdist._tf.variables import Mark


class Equal:
    """Without a hash, as Keras's variables are."""

    __hash__ = None

    def __eq__(self, other):
        return True


class Fact:
    """The fact about one object."""


def test_a_fact_belongs_to_one_object():
    mark = Mark()
    one, other = Equal(), Equal()
    mark.set(one, "first")
    assert (mark.get(one), mark.get(other)) == ("first", None)
    mark.set(one, "second")
    assert mark.get(one) == "second"
    assert mark.pop(one) == "second"
    assert (mark.pop(one), mark.get(one)) == (None, None)


def test_a_fact_ends_with_its_object():
    mark = Mark()
    one = Equal()
    one.itself = one
    facts = [Fact(), Fact()]
    for fact in facts:
        mark.set(one, fact)
    kept = weakref.WeakSet(facts)
    del one, fact, facts
    gc.collect()
    assert len(kept) == 0
