"""TensorFlow's lines at its start are taken out; all others are shown."""

from __future__ import annotations

from kerasdist.cli.run.output import LineTagger, StartUpLines

# As TensorFlow 2.16 to 2.21 write them.
STUB = (
    "I0000 00:00:1795460946.405285    7881 cudart_stub.cc:31] Could not find cuda "
    "drivers on your machine, GPU will not be used."
)
INIT = (
    "E0000 00:00:1795460957.021530    7881 cuda_platform.cc:52] failed call to cuInit: "
    "INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)"
)
START = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to "
    "STDERR",
    STUB,
    "I0000 00:00:1795460946.523180    7881 cpu_feature_guard.cc:227] This TensorFlow "
    "binary is optimized to use available CPU instructions in performance-critical "
    "operations.",
    "To enable the following instructions: AVX2 FMA, in other operations, rebuild "
    "TensorFlow with the appropriate compiler flags.",
    "2025-01-01 12:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom "
    "operations are on. You may see slightly different numerical results due to "
    "floating-point round-off errors from different computation orders.",
    "E0000 00:00:1735732800.123456   12345 cuda_fft.cc:477] Unable to register cuFFT "
    "factory: Attempting to register factory for plugin cuFFT when one has already "
    "been registered",
    "W0000 00:00:1735732800.123456   12345 computation_placer.cc:177] computation "
    "placer already registered. Please check linkage and avoid linking the same "
    "target more than once.",
    INIT,
]
# Of a user, and of a GPU that doesn't work.
OTHERS = [
    "hello",
    "WARNING: All log messages are mine",
    "To enable the following instructions: read the page",
    "E0000 00:00:1795460957.021530    7881 cuda_platform.cc:52] failed call to cuInit: "
    "INTERNAL: CUDA error: Failed call to cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: "
    "system has unsupported display driver / cuda driver combination",
    f"my script says: {STUB}",
    f"{STUB} And more.",
    "",
]


def shown(*pieces, environ=None):
    lines = StartUpLines(environ or {})
    fed = [lines.feed(each.encode(), 0.0) for each in pieces]
    return (b"".join(fed) + lines.flush()).decode()


def test_only_lines_of_the_start_are_taken_out():
    halves = [half for each in START for half in (each[:40], f"{each[40:]}\n")]
    assert shown(*halves) == ""
    both = [each for pair in zip(START, OTHERS, strict=False) for each in pair]
    left = "".join(f"{each}\n" for each in OTHERS)
    assert shown("".join(f"{each}\n" for each in both)) == left


def test_a_gpu_that_is_not_initialized_is_an_error_where_there_is_a_driver():
    assert shown(f"{INIT}\n") == f"{INIT}\n"
    assert shown(f"{INIT}\n", environ={"CUDA_VISIBLE_DEVICES": "0"}) == f"{INIT}\n"
    assert shown(f"{INIT}\n", environ={"CUDA_VISIBLE_DEVICES": "-1"}) == ""


def test_what_is_no_whole_line_passes_at_once():
    lines = StartUpLines({})
    for piece in (b"name? ", b"bar 1\r", b"W", b"\rWARNING: All log", b"\nI am", b"\n"):
        assert lines.feed(piece, 0.0) == piece
    # The begin of such a line waits for its end, and what isn't one comes whole.
    assert lines.feed(b"WARNING: All log mess", 0.0) == b""
    assert lines.feed(b"enger", 0.0) == b"WARNING: All log messenger"
    assert lines.feed(b" indeed\n", 0.0) == b" indeed\n"
    assert lines.feed(START[0].encode(), 0.0) == b""
    assert lines.flush() == b""
    assert lines.feed(b"I0000 00:00:1", 0.0) == b""
    assert lines.flush() == b"I0000 00:00:1"


def test_a_tag_stands_before_each_line_that_is_left():
    lines = StartUpLines({}, LineTagger(b"[1] "))
    assert lines.feed(f"{STUB}\nhello\nI0000 00".encode(), 0.0) == b"[1] hello\n"
    assert lines.flush() == b"[1] I0000 00\n"
