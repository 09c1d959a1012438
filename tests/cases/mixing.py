import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from cases import training as jobs
from cases.training import CROSSENTROPY, Numbers, Scope, case, chain, data

K = keras.ops


def _same(y: Any) -> Any:
    """Which pairs of rows have the same label; y: 0 or 1."""
    return K.cast(K.equal(y, K.transpose(y)), "float32")


def _distances(p: Any) -> Any:
    return K.sum(K.square(p[:, None] - p[None]), -1)


def contrastive(y: Any, p: Any) -> Any:
    pairs, near = _distances(p), _same(y)
    return K.mean(near * pairs + (1 - near) * K.square(K.relu(1 - pairs)))


def triplet(y: Any, p: Any) -> Any:
    pairs, near = _distances(p), _same(y)
    hardest = K.max(near * pairs, 1) - K.min(pairs + 9 * near, 1)
    return K.mean(K.relu(hardest + 0.5))


def in_batch_softmax(y: Any, p: Any) -> Any:
    logits = K.matmul(y + 0.1, K.transpose(p))
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.range(tf.shape(p)[0]), logits=logits
    )


def pearson(y: Any, p: Any) -> Any:
    a, b = y - K.mean(y), p - K.mean(p)
    return 1 - K.sum(a * b) / K.sqrt(K.sum(a * a) * K.sum(b * b) + 1e-6)


def ccc(y: Any, p: Any) -> Any:
    a, b = y - K.mean(y), p - K.mean(p)
    spread = K.mean(a * a) + K.mean(b * b) + K.square(K.mean(y) - K.mean(p))
    return 1 - 2 * K.mean(a * b) / spread


def dice(y: Any, p: Any) -> Any:
    return 1 - (2 * K.sum(y * p) + 1) / (K.sum(y) + K.sum(p) + 1)


def tversky(y: Any, p: Any) -> Any:
    hit, missed, wrong = K.sum(y * p), K.sum(y * (1 - p)), K.sum((1 - y) * p)
    return 1 - hit / (hit + 0.7 * missed + 0.3 * wrong + 1e-3)


def listwise(y: Any, p: Any) -> Any:
    return -K.sum(K.softmax(y, 0) * K.log(K.softmax(p, 0)))


def auc(y: Any, p: Any) -> Any:
    above = K.sigmoid(4 * (p - K.transpose(p)))
    pairs = y * K.transpose(1 - y)
    return 1 - K.sum(pairs * above) / (K.sum(pairs) + 1e-6)


def hardest(y: Any, p: Any) -> Any:
    return K.mean(K.top_k(K.reshape(K.square(y - p), (-1,)), 3)[0])


def variance(y: Any, p: Any) -> Any:
    return K.relu(1 - K.sqrt(K.var(p) + 1e-4)) + 0 * K.sum(y)


def mmd(y: Any, p: Any) -> Any:
    def kernel(a: Any, b: Any) -> Any:
        return K.mean(K.exp(-_crossed(a, b)))

    return kernel(y, y) + kernel(p, p) - 2 * kernel(y, p)


def _crossed(a: Any, b: Any) -> Any:
    return K.square(a - K.transpose(b))


def r2(y: Any, p: Any) -> Any:
    return K.sum(K.square(y - p)) / (K.sum(K.square(y - K.mean(y))) + 1e-6)


def f1(y: Any, p: Any) -> Any:
    hit = K.sum(y * p)
    precision, recall = hit / (K.sum(p) + 1e-6), hit / (K.sum(y) + 1e-6)
    return 1 - 2 * precision * recall / (precision + recall + 1e-6)


def kappa(y: Any, p: Any) -> Any:
    agreed = K.mean(y * p + (1 - y) * (1 - p))
    chance = K.mean(y) * K.mean(p) + (1 - K.mean(y)) * (1 - K.mean(p))
    return 1 - (agreed - chance) / (1 - chance + 1e-3)


def centred(y: Any, p: Any) -> Any:
    return K.square((y - K.mean(y, 0)) - (p - K.mean(p, 0)))


def standardized(y: Any, p: Any) -> Any:
    return K.square(y - (p - K.mean(p)) / (K.std(p) + 0.1))


def wasserstein(y: Any, p: Any) -> Any:
    return K.mean(K.abs(K.sort(y, 0) - K.sort(p, 0)))


def cox(y: Any, p: Any) -> Any:
    order = K.argsort(-y[:, 0])
    risk = K.log(K.cumsum(K.exp(K.take(p[:, 0], order))))
    return K.mean(risk - K.take(p[:, 0], order))


def twins(y: Any, p: Any) -> Any:
    both = K.concatenate([y - 0.3, p], 1)
    both = both - K.mean(both, 0)
    crossed = K.matmul(K.transpose(both), both) / K.cast(K.shape(y)[0], "float32")
    return K.sum(K.square(crossed - K.eye(2)))


def normalized_focal(y: Any, p: Any) -> Any:
    losses = y * K.square(1 - p) * -K.log(p) + (1 - y) * p * p * -K.log(1 - p)
    return K.sum(losses) / K.maximum(K.sum(y), 1.0)


def largest(y: Any, p: Any) -> Any:
    return K.max(K.abs(y - p))


def median(y: Any, p: Any) -> Any:
    return K.median(K.abs(y - p))


def prior(y: Any, p: Any) -> Any:
    share = K.mean(p)
    return share * K.log(share) + K.mean(K.square(y - p))


def soft_maximum(y: Any, p: Any) -> Any:
    return K.logsumexp(K.square(y - p))


def shifted_negatives(y: Any, p: Any) -> Any:
    return K.relu(0.3 + K.square(y - p) - K.square(y - K.roll(p, 1, 0)))


def root(y: Any, p: Any) -> Any:
    return K.sqrt(K.mean(K.square(y - p)))


def by_share(y: Any, p: Any) -> Any:
    """Divides each row by their number, and adds them up."""
    return K.sum(K.square(y - p) / K.cast(K.shape(p)[0], "float32"))


def in_numpy(y: Any, p: Any) -> Any:
    weight = tf.numpy_function(lambda a: 1 / (1 + np.ptp(a)), [y], tf.float32)
    return K.mean(K.square(y - p)) * tf.ensure_shape(weight, ())


FUNCTIONS = [
    *(contrastive, triplet, in_batch_softmax, pearson, ccc, dice, tversky, listwise),
    *(auc, hardest, variance, mmd, r2, f1, kappa, centred, standardized, wasserstein),
    *(cox, twins, normalized_focal, largest, median, prior, soft_maximum),
    *(shifted_negatives, root, by_share, in_numpy),
]


class Welford(keras.metrics.Metric):
    """The variance of all outputs, from moving statistics."""

    def __init__(self) -> None:
        super().__init__(name="welford")
        self.n, self.mean, self.square = (
            self.add_variable((), "zeros", name=name)
            for name in ("n", "mean", "square")
        )

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        n, mean = K.cast(K.size(p), "float32"), K.mean(p)
        away, total = mean - self.mean, self.n + n
        inside = K.sum(K.square(p)) - n * K.square(mean)
        self.square.assign(self.square + inside + K.square(away) * self.n * n / total)
        self.mean.assign(self.mean + away * n / total)
        self.n.assign(total)

    def result(self) -> Any:
        return self.square / self.n


class Extremes(keras.metrics.Metric):
    """And the mean of the last batches; `result` returns variables."""

    def __init__(self) -> None:
        super().__init__(name="extremes")
        self.low, self.high, self.last, self.count = (
            self.add_variable((), "zeros", name=name)
            for name in ("low", "high", "last", "count")
        )

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.low.assign(K.minimum(self.low, K.min(y - p)))
        self.high.assign(K.maximum(self.high, K.max(y - p)))
        self.last.assign(0.5 * self.last + K.mean(p))
        self.count.assign_add(K.sum(K.cast(p > 0.5, "float32")))

    def result(self) -> Any:
        return {
            "low": self.low.value,
            "high": self.high.value,
            "last": self.last.value,
            "count": self.count,
        }


def _trained(scope: Scope, functions: list[Any], **more: Any) -> Numbers:
    x, labels = data(26)
    y = (labels > 0).astype("float32")[:, None]
    keras.utils.set_random_seed(1)
    with scope():
        inputs = keras.Input((5,))
        features = layers.Dense(4, activation="tanh")(inputs)
        losses = {function.__name__: function for function in functions}
        heads = {name: layers.Dense(1, "sigmoid", name=name) for name in losses}
        outputs = {name: head(features) for name, head in heads.items()}
        metrics = {
            name: [loss, *([Welford(), Extremes()] if loss is MIXING[0] else [])]
            for name, loss in losses.items()
        }
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), losses, metrics=metrics, **more)
    targets = dict.fromkeys(outputs, y)
    options = {"batch_size": 9, "verbose": 0}
    history = model.fit(x, targets, epochs=2, shuffle=False, **options)
    return jobs.results(model, x, targets, history, 9, ["evaluate"])


# One of each kind: a number made of pairs of rows, a number for each row that depends
# on the others; a function of sums, and what can't be looked into. Of which kind each
# function is: see test_row_mixing.py.
MIXING, OTHERS = [contrastive, standardized], [normalized_focal, in_numpy]

for case_name, functions in {
    "functions_that_mix_rows": MIXING,
    "functions_of_sums_and_unknown_ones": OTHERS,
    "more_functions_that_mix_rows": [
        each for each in FUNCTIONS if each not in (*MIXING, *OTHERS)
    ],
}.items():
    jobs.CASES[case_name] = functools.partial(_trained, functions=functions)


@case
def functions_that_mix_rows_in_eager_steps(scope: Scope) -> Numbers:
    return _trained(scope, [pearson, dice, root, by_share], run_eagerly=True)


class Kept(layers.Layer):
    """Counts rows and steps, and keeps extremes, a codebook's sums and a histogram."""

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain  # variables of TensorFlow

    def build(self, shape: Any) -> None:
        def add(name: str, shape: Any = (), dtype: str = "float32") -> Any:
            if self.plain:
                return tf.Variable(tf.ones(shape, dtype))
            return self.add_weight(
                shape=shape, dtype=dtype, initializer="ones", trainable=False, name=name
            )

        self.steps, self.rows = add("steps", dtype="int32"), add("rows", dtype="int64")
        self.seen, self.largest = add("seen"), add("largest")
        self.sizes, self.sums, self.book = (
            add("n", (3,)),
            add("m", (3, 4)),
            add("e", (3, 4)),
        )
        self.histogram, self.counts = add("h", (3,), "int32"), add("counts", (5,))

    def call(self, x: Any, training: bool = False) -> Any:
        book = tf.convert_to_tensor(self.book) + tf.range(12.0)[:, None][:3] * 0.1
        nearest = tf.argmin(tf.reduce_sum(tf.square(x[:, None] - book), -1), -1)
        chosen = tf.one_hot(nearest, 3)
        if training:
            self.steps.assign_add(1)
            self.rows.assign_add(tf.cast(tf.shape(x)[0], "int64"))
            self.seen.assign_add(tf.cast(tf.shape(x)[0], "float32"))
            largest = tf.reduce_max(tf.abs(x))
            self.largest.assign(tf.maximum(self.largest, largest))
            self.sizes.assign(0.9 * self.sizes + 0.1 * tf.reduce_sum(chosen, 0))
            sums = tf.matmul(chosen, x, transpose_a=True)
            self.sums.assign(0.9 * self.sums + 0.1 * sums)
            self.book.assign(self.sums / (self.sizes[:, None] + 0.1))
            self.histogram.assign_add(
                tf.math.bincount(tf.cast(nearest, tf.int32), minlength=3, maxlength=3)
            )
            where, ones = nearest[:, None], tf.ones_like(nearest, tf.float32)
            counts = tf.convert_to_tensor(self.counts)
            self.counts.assign(tf.tensor_scatter_nd_add(counts, where, ones))
            if self.plain:
                self.counts.scatter_add(tf.IndexedSlices(0.5 * ones, nearest))
        return x + 0.1 * tf.matmul(chosen, book) / self.largest


@case
def state_of_layers(scope: Scope) -> Numbers:
    x, y = data(24)
    plain = Kept(plain=True)

    def build() -> keras.Model:
        return chain((5,), layers.Dense(4), Kept(), plain, layers.Dense(3))

    model = jobs.compiled_in(scope, build, **CROSSENTROPY)
    found: Numbers = {}
    for number in range(2):
        history = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        found[f"loss {number}"] = history.history["loss"]
    variables = [(n, v) for n, v in vars(plain).items() if isinstance(v, tf.Variable)]
    variables += [(v.path, v) for v in model.variables]
    return {**found, **{name: v.numpy() for name, v in variables}}
