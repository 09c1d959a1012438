import numpy as np
import pytest
from scripts import with_prelude

from certificates import Authority
from hosts import Hosts
from workers import Workers

pytestmark = pytest.mark.netns

SCRIPT = with_prelude("""
import gc, socket
from kerasdist import ParameterServerStrategy, RingStrategy

def connections():
    "The types of the ends of TCP connections."
    return sorted({
        type(s).__name__
        for s in gc.get_objects()
        if isinstance(s, socket.socket) and s.fileno() >= 0
        and s.family == socket.AF_INET and s.type == socket.SOCK_STREAM
        and not s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    })

def fit(strategy):
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x = random.standard_normal((96, 8)).astype("float32")
    y = x.sum(1)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((8,)), keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(1),
        ])
        model.compile(keras.optimizers.Adam(1e-2), "mse")
    losses = model.fit(x, y, batch_size=32, epochs=2, verbose=0).history["loss"]
    weights = [float(np.abs(w).sum()) for w in model.get_weights()]
    return losses + weights, connections()

found = []
if sys.argv[1:]:
    found.append(fit(ParameterServerStrategy(mode="sync", timeout=60)))
else:
    for tls in (None, os.environ["TLS"]):
        if tls:
            os.environ["KERASDIST_TLS"] = tls
        with RingStrategy(timeout=60) as strategy:
            found.append(fit(strategy))
        # Who comes with TLS while rank 0 still listens without it is refused.
        if strategy.rank == 0:
            open(os.environ["LEFT"], "w").close()
        while not os.path.exists(os.environ["LEFT"]):
            time.sleep(0.01)
result(found)
""")


def test_a_fit_has_the_same_numbers(tmp_path):
    tls = Authority(folder=tmp_path).issue()
    with Hosts(3) as hosts:

        def run(env, args=(), servers=0):
            return Workers(
                SCRIPT,
                2,
                args,
                env,
                cluster=hosts.addresses[: 2 + servers],
                prefix=hosts.prefix,
                servers=servers,
            ).results()

        rings = run({"TLS": tls, "LEFT": str(tmp_path / "left")})
        served = run({"KERASDIST_TLS": tls}, ["servers"], 1)
    for (plain, of_ring), (of_servers,) in zip(rings, served, strict=True):
        numbers, sockets = plain
        assert sockets == ["socket"]
        assert of_ring == [numbers, ["TlsSocket"]]
        # Servers add up the gradients in another order.
        np.testing.assert_allclose(of_servers[0], numbers, rtol=1e-5)
        assert of_servers[1] == ["TlsSocket"]
