import itertools

import pytest
from scripts import NOTING, PRELUDE

from kerasdist.strategies.data.own_rows import own_sizes
from workers import Workers

SCRIPT = PRELUDE + NOTING
SCRIPT += """
strategy = kerasdist.RingStrategy(timeout=100)
rank, size = strategy.rank, strategy.size
Policy = tf.data.experimental.AutoShardPolicy
# Each rank has a folder of its own, where the others' files aren't.
folder = Path(sys.argv[1]) / str(rank)
folder.mkdir()
SAMPLES = [5, 9, 2, 12]

def write(name, values):
    path = str(folder / name)
    with tf.io.TFRecordWriter(path) as file:
        for value in values:
            file.write(str(value).encode())
    return path

files = [str(folder / f"part-{i}") for i in range(4)]
for i in range(rank, 4, size):
    write(f"part-{i}", range(100 * i, 100 * i + SAMPLES[i]))

def parse(records):
    values = tf.reshape(tf.strings.to_number(records), [-1, 1])
    return values, tf.zeros_like(values)

def by(policy, dataset):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return untuned(dataset.with_options(options))

def read(paths, batch_size=8):
    records = tf.data.TFRecordDataset(paths).batch(1).map(parse).unbatch()
    return by(Policy.FILE, records.batch(batch_size))

model = noting(0.0)
model.run_eagerly = True  # takes less time

def fit(dataset, **options):
    '''What was trained on: the rows of each step that had any.'''
    before = int(model.optimizer.iterations.numpy())
    model.fit(dataset, **{"verbose": 0, **options})
    rows = []
    for step in trained:
        # A worker whose data have ended goes on with a copy of a row, without weight.
        if not (len(step) == 1 and rows and step[0] in rows[-1]) and step != [0]:
            rows.append(step)
    trained.clear()
    return [rows, int(model.optimizer.iterations.numpy()) - before]

def predict(dataset):
    return model.predict(dataset, verbose=0).ravel().tolist()

def refusal(dataset):
    return refused(lambda: model.fit(dataset, verbose=0))
"""


def test_each_worker_reads_its_own_files(tmp_path):
    body = """
data = read(files)
evaluated = model.evaluate(data, verbose=0)
steps = fit(data, epochs=2, verbose=2)
mapped = fit(data.map(lambda x, y: (x, y)))
given = fit(strategy.experimental_distribute_dataset(data))
weighted = fit(data, class_weight={0: 2.0})
result([evaluated, predict(data), steps, mapped, given, weighted])

none = write("none", [])
outer = [
    refusal(read(files[rank:rank + 1])),
    refusal(read([files[0], none] if rank == 0 else [none, none])),
    refusal(by(Policy.FILE, tf.data.Dataset.range(10).batch(2))),
    refusal(by(Policy.FILE, tf.data.TFRecordDataset(files))),
]
# After these errors, which all ranks raise, the strategy can still be used.
result([outer, fit(data)[1]])

own = untuned(tf.data.Dataset.from_tensor_slices(
    [[float(v)] for v in range(100 * rank + 1, 100 * rank + 4 + 4 * rank)]
)).map(lambda v: (v, 0 * v))
same = untuned(
    tf.data.Dataset.from_tensor_slices([[float(v)] for v in range(11)]).batch(4)
)
result([
    fit(by(Policy.OFF, own.batch(4))),
    fit(by(Policy.DATA, own.take(3).batch(4)).map(lambda x, y: (x * 0 + 1, y)))[1],
    fit(same.map(lambda x: (x, x)), verbose=2)[1],
    fit(tf.data.Dataset.zip((same.unbatch(), same.unbatch())).batch(4), verbose=2)[1],
    predict(strategy.experimental_distribute_dataset(same)),
    predict(by(Policy.DATA, same)),
    predict(strategy.distribute_datasets_from_function(
        lambda context: own.map(lambda x, y: x).batch(2)
    )),
])
"""
    chief, other = Workers(SCRIPT + body, 2, args=[str(tmp_path)], deadline=150).run()
    a, b = chief.results[0], other.results[0]
    names = [[*range(100 * i, 100 * i + n)] for i, n in enumerate([5, 9, 2, 12])]
    own = [names[0] + names[2], names[1] + names[3]]
    everything = own[0] + own[1]
    assert (
        a[0] == b[0] == pytest.approx(sum(v * v for v in everything) / len(everything))
    )
    # Step after step, and in each the ranks in order.
    steps = [own[r][4 * s : 4 * s + 4] for s in range(6) for r in range(2)]
    assert a[1] == b[1] == [value for step in steps for value in step]
    for rank, results in enumerate((a, b)):
        once = [own[rank][4 * s : 4 * s + 4] for s in range(-(-len(own[rank]) // 4))]
        assert results[2] == [once * 2, 12]
        # Where a function follows `batch`, each batch is cut by itself.
        assert sorted(itertools.chain(*results[3][0])) == sorted(own[rank])
        assert results[4] == [once, 6]
        assert sorted(itertools.chain(*results[5][0])) == sorted(own[rank])
    for finished in (chief, other):
        (few, empty, no_files, no_batches), steps = finished.results[1]
        assert "Received: 1 file(s), 2 workers. Write the data into more" in few
        assert "Received: nothing on ranks [1] of 2." in empty
        assert "TensorFlow finds no files" in no_files
        assert "must be global batches" in no_batches
        assert steps == 6
        _, with_data, three, again, *predicted = finished.results[2]
        distributed, divided, from_function = predicted
        assert (with_data, three, again) == (1, 3, 3)
        assert distributed == divided == list(range(11))
        assert from_function == [1, 2, 101, 102, 3, 103, 104, 105, 106, 107]
    assert chief.results[2][0] == [[[1, 2], [3]], 4]
    assert other.results[2][0] == [[[101, 102], [103, 104], [105, 106], [107]], 4]
    for said in (
        "global batch 8, per worker 4, number of samples unknown, divided by file",
        "global batch unknown, 3 batch(es)",
        "global batch 4, per worker 2, number of samples unknown",
    ):
        assert (
            f"kerasdist: 2 workers with 2 replicas in all, {said}, learning rate 0"
        ) in chief.output


@pytest.mark.parametrize(("batch_size", "replicas"), [(8, 2), (7, 4), (2, 3), (1, 1)])
def test_the_replicas_together_get_a_global_batch_in_each_step(batch_size, replicas):
    sizes = [own_sizes(batch_size, first, replicas) for first in range(replicas)]
    for step in zip(*sizes, strict=True):
        assert sum(step) == batch_size
    for own in sizes:
        assert sum(own) == batch_size
        assert max(own) - min(own) <= 1
