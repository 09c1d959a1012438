import json
import re
import sys

import pytest

from places import ROOT
from workers import Workers, output_of

EXAMPLES = ROOT / "examples"


def trained(script: str, *args: str, size: int = 1, servers: int = 0) -> str:
    job = Workers(EXAMPLES / script, size, args, servers=servers, deadline=150)
    return "".join(finished.output for finished in job.run()[:size])


def accuracy(output: str) -> float:
    (found,) = re.findall(r"^test loss \S+, test accuracy (\S+)$", output, re.M)
    return float(found)


def test_the_demo_on_two_workers():
    two = trained("digits.py", "--epochs", "8", size=2)
    assert "weights bit-equal on all workers: True" in two
    hashes = re.findall(r"rank \d of 2: weights (\w{16})$", two, re.M)
    assert len(hashes) == 2
    assert len(set(hashes)) == 1
    assert accuracy(two) > 0.9
    assert f"saved and reloaded model {accuracy(two):.4f}" in two
    assert re.search(r"^\d+ examples/s with 2 worker\(s\)$", two, re.M)


@pytest.mark.soak
def test_a_function_from_python():
    """TensorFlow is in use in the caller, before and after."""
    output = output_of(sys.executable, EXAMPLES / "from_python.py")
    assert output.startswith("4810 weights, 10 kinds of digits\n")
    assert "Epoch 8/8" in output
    assert "the same on all workers: True" in output
    (found,) = re.findall(r"^test accuracy (\S+)$", output, re.M)
    assert float(found) > 0.8


@pytest.mark.soak
def test_callbacks(tmp_path):
    trace = tmp_path / "trace.json"
    output = trained("callbacks.py", str(trace), size=2)
    assert re.search(r"^kerasdist: learning rate 0\.1 x 2 .* = 0\.2, ", output, re.M)
    assert re.search(r"^kerasdist: all 2 workers hold the state", output, re.M)
    assert float(re.findall(r"^accuracy (\S+)$", output, re.M)[0]) > 0.85
    events = json.loads(trace.read_text())["traceEvents"]
    assert len({event["pid"] for event in events}) == 2


@pytest.mark.soak
def test_two_stages_of_a_model_that_is_too_large_for_one_device():
    output = trained("two_stage.py", "--epochs", "2")
    alone, _, two = output.partition("On two:")
    assert "doesn't fit into the memory of 1 device" in alone
    assert re.search(r"^CPU:0 +6 .* too much ", alone, re.M)
    assert re.search(r"^CPU:1 +4 ", two, re.M)
    assert re.search(r"^  digits/hidden +CPU:1 +\d+ +[1-9]", two, re.M)
    assert accuracy(two) > 0.8


@pytest.mark.soak
def test_a_table_of_words_on_servers():
    options = ("--epochs", "2", "--words", "50000")
    output = trained("embedding_ps.py", *options, size=2, servers=2)
    assert f"the table has {4 * 50_000 * 32} bytes" in output
    pattern = r"rank \d of 2: (\d+) steps, (\d+) bytes sent and (\d+) bytes received"
    found = [list(map(int, each)) for each in re.findall(pattern, output)]
    # 20,000 texts in batches of 64, 2 epochs.
    assert sum(steps for steps, _, _ in found) == 2 * 313
    for steps, sent, received in found:
        # A step has 960 words at most, and this worker reads what others change too.
        assert sent < 960 * (4 * 32 + 4) + 4000
        assert received * steps < 2 * 313 * (960 * (4 * 32 + 4) + 4000)
    assert accuracy(output) > 0.7


@pytest.mark.soak
def test_both_at_once():
    output = trained("hybrid.py", "--epochs", "3", size=2)
    first, second = re.findall(r"rank \d of 2: weights (\w{16})$", output, re.M)
    assert first == second
    assert re.search(r"^encoder_2 is on \S*/device:CPU:0$", output, re.M)
    assert re.search(r"^classifier_1 is on \S*/device:CPU:1$", output, re.M)
    assert accuracy(output) > 0.8
