"""A job that trains by any transport, for tests of transports in other folders."""

from scripts import with_prelude

ALL_TRANSPORTS = with_prelude("""
from kerasdist import RingStrategy

transport, devices, eagerly = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "eager"
if devices > 1:
    logical_devices(devices)
keras.utils.set_random_seed(1)
names = [f"CPU:{i}" for i in range(devices)]
strategy = RingStrategy(names, transport=transport, timeout=60)
random = np.random.default_rng(0)
x = random.standard_normal((110, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
with strategy.scope():
    hidden, last = keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((8,)), hidden, last])
    model.compile(
        keras.optimizers.Adam(1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        run_eagerly=eagerly,
    )
history = model.fit(x, y, batch_size=32, epochs=2, verbose=0).history
loss, accuracy = model.evaluate(x, y, batch_size=32, verbose=0)
outputs = model.predict(x, batch_size=48, verbose=0)
weights = np.concatenate([w.ravel() for w in model.get_weights()])
assert strategy.extended.worker_devices[0].startswith(
    "/job:worker" if transport == "native" else "/job:localhost"
)
same = strategy.communicator.all_gather(weights)
result({
    "equal": all(w.tobytes() == weights.tobytes() for w in same),
    "weights": weights.tolist(),
    "loss": history["loss"], "evaluated": [loss, accuracy],
    "outputs": outputs.tolist(),
    "communicator": type(strategy.communicator).__name__,
    "step": strategy.communicator.step,
    "task": strategy.cluster_resolver.task_id,
    "local": [strategy.local_rank, strategy.local_size],
})
""")
