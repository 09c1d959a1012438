"""Placed models are where they belong, and compute what they compute unplaced.

Where operations were is what the runtime's metadata say, see `placement_zoo`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from devices import begin

from placement_zoo import ZOO
from workers import Workers

pytestmark = pytest.mark.timeout(300)
PARTS = 2

SCRIPT = (
    begin(3)
    + """
sys.path.insert(0, os.environ["TESTS"])
import placement_zoo as zoo

def place(kind, count, gradients=True):
    devices = [f"CPU:{i}" for i in range(count)]
    strategy = kerasdist.ModelParallelStrategy(
        zoo.placement(kind, devices), devices=devices
    )
    strategy.extended.places_gradients = gradients
    def stage(index):
        return strategy.stage(devices[min(index, count - 1)])
    with zoo.run_metadata() as graphs:
        found = zoo.numbers(kind, strategy.scope, stage)
    return devices, graphs, found

part, parts = int(os.environ["PART"]), int(os.environ["PARTS"])
for name in list(zoo.ZOO)[part::parts]:
    kind = zoo.ZOO[name]
    plain = zoo.plain_numbers(name, os.environ["PLAIN"])
    for count in (2, 3):
        devices, graphs, found = place(kind, count)
        model = found.pop("model")
        backward, wrong = zoo.misplaced(graphs, devices)
        differ = [
            f"{mine} {np.max(np.abs(found[mine] - plain[theirs]))}"
            for mine, theirs in zip(found, plain, strict=True)
            if not (
                np.array_equal(found[mine], plain[theirs])
                if kind.exact
                else np.allclose(found[mine], plain[theirs], rtol=1e-5, atol=1e-6)
            )
        ]
        print("RESULT", json.dumps({
            "name": name,
            "count": count,
            "backward": backward,
            "misplaced": wrong[:10],
            "variables": zoo.misplaced_variables(model, devices)[:10],
            "moved": zoo.moved_into_updates(graphs)[:10],
            "differ": differ[:10],
        }), flush=True)
if part == 0:
    devices, graphs, _ = place(zoo.ZOO["everything"], 3, gradients=False)
    print("RESULT", json.dumps(zoo.misplaced(graphs, devices)[1]))
"""
)


@pytest.fixture(scope="module")
def results(plain_folder):
    """What each process found: of each kind on 2 and 3 devices, then without 5."""

    def environment(rank):
        tests = str(Path(__file__).parent)
        return {
            "TESTS": tests,
            "PLAIN": str(plain_folder),
            "PART": str(rank),
            "PARTS": str(PARTS),
            "TF_CONFIG": None,
        }

    with Workers(SCRIPT, PARTS, env=environment, deadline=280, handover=False) as job:
        return [worker.results for worker in job.succeed()]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", list(ZOO))
def test_a_model_is_where_it_belongs_and_its_numbers_are_the_same(results, name, count):
    found = [
        result
        for part in results
        for result in part
        if isinstance(result, dict)
        and (result["name"], result["count"]) == (name, count)
    ]
    assert len(found) == 1
    assert found[0].pop("backward") > 0
    assert found[0] == {
        "name": name,
        "count": count,
        "misplaced": [],
        "variables": [],
        "moved": [],
        "differ": [],
    }


def test_it_is_seen_if_the_backward_pass_stays_on_one_device(results):
    wrong = results[0][-1]
    assert wrong
    assert all("gradient_tape/" in operation for operation in wrong)
