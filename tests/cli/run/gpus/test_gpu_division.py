"""The division of GPUs among the workers of a host."""

from __future__ import annotations

from kerasdist.cli.run.gpus.division import Division, divide, in_words

NAMES = [f"GPU-{i}" for i in range(8)]


def sizes(option: str, gpus: int, workers: int) -> list[int]:
    faults: list[str] = []
    shares = divide(option, NAMES[:gpus], workers, faults).shares
    assert not faults
    assert shares is not None
    given = [name for share in shares for name in share]
    assert given == NAMES[: len(given)]
    return [len(share) for share in shares]


def test_shares_are_disjoint_and_nearly_equal() -> None:
    assert sizes("auto", 8, 4) == [2, 2, 2, 2]
    assert sizes("auto", 3, 2) == [1, 2]
    assert sizes("auto", 4, 1) == [4]
    assert sizes("2", 8, 3) == [2, 2, 2]
    assert sizes("none", 4, 2) == [0, 0]
    assert sizes("0", 4, 2) == [0, 0]


def test_without_gpus_or_with_all_nothing_is_set() -> None:
    for option, names in (("auto", []), ("all", NAMES)):
        division = divide(option, names, 2, [])
        assert division.shares is None
        assert division.environ(0) == division.environ(None) == {}
        assert not in_words([division])


def test_a_server_gets_none() -> None:
    division = divide("auto", NAMES[:3], 2, [])
    assert division.environ(0) == {"CUDA_VISIBLE_DEVICES": "GPU-0"}
    assert division.environ(1) == {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}
    assert division.environ(None) == {"CUDA_VISIBLE_DEVICES": "-1"}


def test_a_worker_gets_one_part_of_a_gpu() -> None:
    """CUDA gives a process only one."""
    parts = [f"MIG-{i}" for i in range(4)]
    division = divide("auto", parts, 2, [])
    assert division.shares == (("MIG-0",), ("MIG-1",))
    assert in_words([division]) == "4 GPUs for 2 workers, 1 each; 2 not used"
    faults: list[str] = []
    divide("2", parts, 2, faults)
    assert faults == [
        "this host has parts of GPUs (MIG), of which CUDA gives a process only one. "
        "Received: --gpus 2. Expected --gpus 1 or --gpus auto"
    ]


def test_too_few_are_a_fault() -> None:
    for option, begin, remedy in [
        ("auto", "b has 2 GPUs for 3 workers. Expected at least", "--gpus none"),
        ("1", "b has 2 GPUs for 3 workers, which isn't enough. Rec", "3 GPUs or more"),
    ]:
        faults: list[str] = []
        assert divide(option, NAMES[:2], 3, faults, "b").shares is None
        (fault,) = faults
        assert fault.startswith(begin)
        assert remedy in fault


def test_equal_hosts_are_said_together() -> None:
    def of(host: str, gpus: int, workers: int) -> Division:
        return divide("auto", NAMES[:gpus], workers, [], host)

    assert in_words([of("a", 4, 2), of("b", 4, 2), of("c", 1, 1), of("d", 0, 2)]) == (
        "a, b: 4 GPUs for 2 workers, 2 each; c: 1 GPU for 1 worker, 1 each"
    )
    assert in_words([of("", 3, 2)]) == "3 GPUs for 2 workers, 1 or 2 each"
