import numpy as np
import pytest
from elastic_jobs import elastic_script

from workers import Workers

SCRIPT = elastic_script("""
start, all_of_them, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if not alone and me >= start:
    while not os.path.exists(f"{folder}/fit"):
        time.sleep(0.05)
options = {} if alone else {"elastic": True, "start_workers": start}
strategy = kerasdist.RingStrategy(**options)
batch = 32 if alone else 32 // start * strategy.num_replicas_in_sync
sizes = [strategy.size]
local = [strategy.local_rank, strategy.local_size]
model = classifier(strategy)

class Grow(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        sizes.append(strategy.size)
        if alone or me >= start:
            return
        if epoch == 1:
            open(f"{folder}/fit", "w").close()
        if epoch >= 3:
            # Until the next one is there, at most a minute.
            for _ in range(6000):
                size = strategy.size
                if size == all_of_them or strategy.communicator.membership.waiting:
                    break
                time.sleep(0.01)

    def on_train_batch_end(self, batch, logs=None):
        if not alone:
            time.sleep(0.01)

history = model.fit(
    x, y, batch_size=batch, epochs=8, verbose=0, validation_data=(x[:50], y[:50]),
    callbacks=[
        Grow(),
        kerasdist.callbacks.ScaleLearningRate(warmup_epochs=0, base_batch_size=16),
    ],
)
print("RESULT", json.dumps([
    lists(history.history),
    whole(model),
    sizes,
    strategy.size,
    float(model.optimizer.learning_rate),
    [*local, strategy.local_rank - strategy.rank, strategy.local_size],
]))
""")


@pytest.mark.soak
@pytest.mark.parametrize(("start", "size"), [(1, 2), (2, 3)])
def test_the_numbers_are_those_of_one_process(tmp_path, start, size):
    args = [str(start), str(size), str(tmp_path)]
    (alone,) = Workers(SCRIPT, 1, args, env={"TF_CONFIG": None}).results()
    expected, weights, _, _, rate, _ = alone
    finished = Workers(SCRIPT, size, args, handover=False, deadline=150.0).run()
    for each in finished:
        history, found, sizes, last, found_rate, local = each.result
        # Before it has joined, a worker sees the size with which the others started.
        assert sizes[0] == start
        assert last == size
        # All are on this host; one that is to join is alone until then.
        assert local[1:] in ([start, 0, size], [1, 0, size])
        assert found_rate == rate
        assert history.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-5)
    # To the bit among the workers.
    assert all(each.result[1] == finished[0].result[1] for each in finished)
