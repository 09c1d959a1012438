import gc
import weakref

from kerasdist._tf.variables import Mark


class Equal:
    """Without a hash, as Keras's variables are."""

    __hash__ = None

    def __eq__(self, other):
        return True


def test_a_fact_belongs_to_one_object_and_ends_with_it():
    mark = Mark()
    one, other, fact = Equal(), Equal(), Equal()
    mark.set(one, "first")
    assert (mark.get(one), mark.get(other)) == ("first", None)
    assert mark.pop(one) == "first"
    mark.set(one, fact)
    one.itself = one
    kept = weakref.ref(fact)
    del one, fact
    gc.collect()
    assert kept() is None
