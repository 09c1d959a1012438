import pytest
from scripts import with_prelude

from board import Board, series
from workers import Workers

SCRIPT = with_prelude("""
from kerasdist.callbacks import ScalingTensorBoard

x = np.random.default_rng(0).normal(size=(64, 40)).astype("float32")
strategy = kerasdist.RingStrategy(compression="powersgd")
with strategy.scope():
    layers = [keras.Input((40,)), keras.layers.Dense(30), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
board = ScalingTensorBoard(os.environ["FOLDER"])
model.fit(x, x[:, :1], batch_size=16, epochs=3, verbose=0, callbacks=[board])
result(board.figures and dict(board.figures.compression))
""")


@pytest.mark.soak
def test_bytes_before_and_after_and_the_norm_of_the_rest(tmp_path):
    figures, _ = Workers(
        SCRIPT, 2, env={"FOLDER": str(tmp_path)}, deadline=90
    ).results()
    rest = 30 + 30 + 1  # sent as it is, and one matrix as two thin ones of two columns
    assert figures["bytes_before"] == 4 * (40 * 30 + rest)
    assert figures["bytes_after"] == 4 * (2 * (40 + 30) + rest)
    assert figures["unsent_norm"] > 0
    board = Board(tmp_path / "scaling")
    for name, value in figures.items():
        last = series(board, f"compression/{name}")[-1]
        assert last[1] == pytest.approx(value, rel=1e-6)
