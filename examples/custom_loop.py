"""A training loop without `fit`, as in `tf.distribute`, on any number of workers.

kerasdist run -n 2 examples/custom_loop.py
python examples/custom_loop.py              # the same script, one worker
"""

import keras
import tensorflow as tf

import kerasdist

keras.utils.set_random_seed(0)
strategy = kerasdist.RingStrategy()
global_batch = 64
x = tf.random.stateless_normal([500, 8], seed=[1, 2])
y = tf.reduce_sum(x, axis=1, keepdims=True)
# The elements are global batches; each worker gets its rows of them.
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(global_batch)

with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)


def replica_step(x, y):
    with tf.GradientTape() as tape:
        error = tf.square(model(x, training=True) - y)
        # The gradients of all replicas are summed: divide by the rows of the
        # global batch, not by those of this replica.
        loss = tf.reduce_sum(error) / global_batch
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


@tf.function
def train_step(batch):
    losses = strategy.run(replica_step, args=batch)
    return strategy.reduce("SUM", losses, axis=None)


for _ in range(3):
    for batch in strategy.experimental_distribute_dataset(dataset):
        loss = train_step(batch)
print(f"rank {strategy.rank} of {strategy.size}: loss {float(loss):.6f}", flush=True)
