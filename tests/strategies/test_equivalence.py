"""N workers equal one process: the numeric contract.

Each layout (workers x devices, with parameter servers or without) runs cases of `cases`
in one job, or two; the numbers of one plain process are the reference. On all ranks the
numbers must be the same bits.
"""

import contextlib
import json
import pickle
import re
import uuid

import numpy as np
import pytest

from cases import CASES
from places import ROOT, SCRIPTS_PATH
from workers import Workers

RUN = """
import contextlib, gc, hashlib, json, os, pickle, sys
sys.path[:0] = os.environ["TESTS"].split(os.pathsep)
import tensorflow as tf
devices = int(os.environ.get("DEVICES", "1"))
if devices > 1:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * devices,
    )
import numpy as np
import keras
from cases import CASES
if os.environ.get("COMPILED"):
    models = []
    def compile_(self, *args, **options):
        models.append(self)
        options.setdefault("jit_compile", True)
        return super(keras.Model, self).compile(*args, **options)
    keras.Model.compile = compile_
if os.environ.get("PLAIN"):
    rank, scope = 0, contextlib.nullcontext
else:
    import kerasdist
    options = {}
    if os.environ.get("COMPILED"):
        # Buckets of few gradients: the backward pass is in several parts.
        options = json.loads(os.environ["COMPILED"])
    if os.environ.get("PLACED"):
        # Of layers that are named by Keras, each second one.
        options = {
            "placement": {r".*_\\d*[13579]": "CPU:1", ".*": "CPU:0"},
            "micro_batches": int(os.environ["PLACED"]),
        }
    if os.environ.get("OPTION") == "factors":
        options["compression"] = "factors"
    if os.environ.get("OPTION") == "balance":
        import itertools
        from kerasdist.strategies import balance
        options["balance"] = "measured"
        shares = itertools.cycle([[0.3, 0.7], [0.85, 0.15]])
        balance.shares_of = lambda speeds, rows: next(shares)
    strategy = getattr(kerasdist, os.environ["STRATEGY"])(
        devices=[f"CPU:{i}" for i in range(devices)], timeout=100, **options
    )
    rank, scope = strategy.rank, strategy.scope
collected = {}
for name in sys.argv[2:] or CASES:
    try:
        numbers = {k: np.asarray(v) for k, v in CASES[name](scope).items()}
    except Exception as error:
        import traceback
        traceback.print_exc()
        print("RESULT", json.dumps([name, repr(error)]), flush=True)
        sys.exit(1)
    if os.environ.get("COMPILED"):
        assert all(m.jit_compile is True or m.run_eagerly for m in models), name
    keras.backend.clear_session()
    # What lives on is in no case's way: no collection has to look at it again.
    gc.freeze()
    digest = hashlib.sha256()
    for key in sorted(numbers):
        digest.update(key.encode() + numbers[key].tobytes())
    print("RESULT", json.dumps([name, digest.hexdigest()]), flush=True)
    collected[name] = numbers
if rank == 0:
    with open(sys.argv[1], "wb") as file:
        pickle.dump(collected, file)
"""
SHARED = {"TESTS": SCRIPTS_PATH, "OPTIMIZED": "1"}
Numbers = dict[str, dict[str, np.ndarray]]
pytestmark = pytest.mark.timeout(400)


@contextlib.contextmanager
def reference(names, folder, option):
    """Starts to make the numbers of one plain process; waits for them when called."""
    env = {**SHARED, "PLAIN": "1", "TF_CONFIG": None}
    if option == "compiled":
        env["COMPILED"] = "1"
    known = {name: folder / f"{option == 'compiled'}-{name}" for name in names}
    missing = [name for name in names if not known[name].exists()]
    with contextlib.ExitStack() as stack:
        if missing:
            path = folder / f"made-{uuid.uuid4()}"  # another test may make them, too
            args = [str(path), *missing]
            job = stack.enter_context(
                Workers(RUN, 1, args=args, env=env, deadline=300, handover=False)
            )

        def wait():
            if missing:
                job.succeed()
                for name, numbers in pickle.loads(path.read_bytes()).items():
                    path.write_bytes(pickle.dumps(numbers))
                    path.replace(known[name])
            return {name: pickle.loads(known[name].read_bytes()) for name in names}

        yield wait


# What other layouts add to two workers: the division of rows, and how replicas meet.
SUMS = ("fewer_rows_than_replicas", "accumulation_of_slices")
# What a third worker adds: sums that aren't those of pairs.
ODD = ("fewer_rows_than_replicas", "overflow_on_one_replica")
# And a placement: where the gradients are, and where they are updated.
PLACED = ("custom_train_step", "embedding")
# What a script does with gradients, functions and state that mix rows, and one of each
# other kind: no other layout adds to these.
CORE = (
    *("changed_slices", "optimizers_that_change_gradients", "mixed_precision"),
    *("functions_that_mix_rows", "state_of_layers"),
)
# In `make test`, with their core. Three workers show what an odd number adds.
QUICK = ("2x1", "3x1", "2x2", "2x1-servers2", "2x2-placed2", "2x1-compiled")

# What has other numbers with micro-batches, or is refused: see docs/pipelines.md.
WHOLE_BATCHES = {
    # BatchNormalization normalizes each micro-batch.
    "changed_gradients",
    "changed_gradients_of_eager_steps",
    "changed_slices",
    "gradients_of_other_things",
    "more_changed_gradients",
    "inputs_of_the_whole_batch",
    "synchronized_batch_normalization",
    # A layer assigns its state for each micro-batch.
    "state_of_layers",
    # A state for each row of the batch.
    "stateful_rows",
    # `add_loss` of a sum.
    "sums_in_add_loss",
}
# An optimizer that was built outside of the scope is refused with a placement.
INSIDE = {"made_and_compiled_outside"}
# A batch size of `keras.Input` is that of each replica.
FIXED_SIZES = {"stateful_rows"}
# Plain Keras can't compile them either; or losses are refused that mix rows.
NOT_COMPILED = {
    "slices_of_sparse_input",
    "functions_of_sums_and_unknown_ones",
    "state_of_layers",
    "functions_that_mix_rows",
    "more_functions_that_mix_rows",
}
# Tensors of unequal rows must have equal parts, see docs/limits.md.
EQUAL_PARTS = {"zipped_batches_of_two_sizes"}


def layouts():
    made: list[object] = []
    for workers, devices, servers, core, *more in [
        (1, 2, 0, SUMS),
        (2, 1, 0, CORE),
        # Of one worker there is nothing to divide.
        (1, 1, 0, PLACED),
        (3, 1, 0, ODD),
        (2, 2, 0, ("fewer_rows_than_replicas",)),
        (2, 1, 2, ("fewer_rows_than_replicas", *PLACED)),
        # One replica per worker, whose layers are on two devices; micro-batches.
        (2, 2, 0, PLACED, 2),
        # Factors of gradients in place of gradients.
        (2, 1, 0, PLACED, 0, "factors"),
        # Other shares of the rows in each epoch.
        (2, 1, 0, (*SUMS, *CORE), 0, "balance"),
        # Compiled by XLA, as the reference is; with one server asynchronous.
        (2, 1, 0, ("embedding",), 0, "compiled"),
        (1, 2, 0, ("embedding",), 0, "compiled"),
        (2, 1, 2, PLACED, 0, "compiled"),
        (1, 1, 1, PLACED, 0, "compiled"),
    ]:
        name = f"{workers}x{devices}" + (f"-servers{servers}" if servers else "")
        placed, option, *_ = (*more, *(0, "")[len(more) :])
        name += f"-placed{placed}" if placed else ""
        name += f"-{option}" if option else ""
        parts = {"core": core}
        # A job of all others would take minutes: they are dealt out to six.
        left_out = EQUAL_PARTS if workers * devices > 2 else set()
        left_out = WHOLE_BATCHES | INSIDE | left_out if placed else left_out
        if option == "compiled":
            left_out = NOT_COMPILED | left_out
        if option == "balance":
            left_out = FIXED_SIZES | EQUAL_PARTS | left_out
            parts["core"] = tuple(case for case in core if case not in left_out)
        others = [
            case
            for case in CASES
            if case not in sum(parts.values(), ()) and case not in left_out
        ]
        if option != "compiled" or (workers, servers) == (2, 0):
            parts |= {f"{i}": tuple(others[i::6]) for i in range(6)}
        for part, cases in parts.items():
            marks = [] if part == "core" and name in QUICK else [pytest.mark.soak]
            layout = workers, devices, servers, placed, option, cases
            made.append(pytest.param(*layout, id=f"{name}-{part}", marks=marks))
    return made


@pytest.mark.parametrize(
    ("workers", "devices", "servers", "placed", "option", "cases"), layouts()
)
def test_workers_equal_one_process(
    workers, devices, servers, placed, option, cases, tmp_path, plain_folder
):
    path = tmp_path / "numbers"
    env = {
        **SHARED,
        "DEVICES": str(devices),
        "STRATEGY": "ParameterServerStrategy" if servers else "RingStrategy",
    }
    if "mixed_precision" in cases:
        # Unlike in other tests: threads must not change any number.
        env |= {"TF_NUM_INTRAOP_THREADS": "3", "TF_NUM_INTEROP_THREADS": "4"}
    if placed:
        env["PLACED"] = str(placed)
    if option == "compiled":
        chosen = {"mode": "async"} if servers == 1 else {"bucket_size": 64}
        env["COMPILED"] = json.dumps(chosen)
    elif option:
        env["OPTION"] = option
    with (
        reference(cases, plain_folder, option) as wait_for_reference,
        Workers(
            RUN,
            workers,
            servers=servers,
            args=[str(path), *cases],
            env=env,
            deadline=300,
        ) as job,
    ):
        first, *others = job.succeed()[:workers]
        for other in others:
            assert other.results == first.results, "the ranks' numbers differ"
        ours: Numbers = pickle.loads(path.read_bytes())
        expected_of = wait_for_reference()
    assert set(ours) == set(cases)
    faults = []
    for name in ours:
        expected = expected_of[name]
        assert ours[name].keys() == expected.keys(), name
        for key, value in expected.items():
            coarse = key.startswith("coarse")
            try:
                np.testing.assert_allclose(
                    ours[name][key],
                    value,
                    rtol=3e-2 if coarse else 1e-5,
                    atol=3e-2 if coarse else 1e-6,
                )
            except AssertionError as error:
                worst = str(error).strip().splitlines()
                faults.append(f"{name}: {key}: {' '.join(worst)[:300]}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("page", ["README.md", "docs/limits.md"])
def test_the_pages_count_the_jobs(page):
    text = (ROOT / page).read_text("utf-8")
    assert re.findall(r"(\d+)\straining\sjobs", text) == [str(len(CASES))]
