"""Steps of training that are repeated after a change of the workers.

Here: what a step must keep for that, and its repetition. Not here: the agreement on the
members, and the iterators that yield a batch again (`_keras.data.arrays`).
"""
