"""GPipe's schedule, its bubble, and its picture."""

from __future__ import annotations

import pytest

from kerasdist.placement.micro_batch_order import Pipeline


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_each_stage_works_on_what_the_one_before_has_finished(stages, parts):
    names = tuple(f"CPU:{i}" for i in range(stages))
    pipeline = Pipeline(stages=names, micro_batches=parts)
    table = pipeline.slots()
    when = {
        (stage, text): slot
        for stage, row in enumerate(table)
        for slot, text in enumerate(row)
        if text
    }

    assert len(when) == 2 * stages * parts
    for (stage, text), slot in when.items():
        if text[0] == "F":
            assert stage == 0 or when[stage - 1, text] == slot - 1
            assert slot < when[stage, f"B{text[1:]}"]
        else:
            assert stage == stages - 1 or when[stage + 1, text] == slot - 1
    idle = sum(not text for row in table for text in row)
    assert idle / (stages * len(table[0])) == pytest.approx(pipeline.bubble)
    # All of the work on one device takes 2 M S slots.
    assert len(table[0]) / (2 * parts * stages) == pytest.approx(pipeline.bound)


def test_the_picture():
    names = tuple(f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in range(2))

    assert str(Pipeline(stages=names, micro_batches=4)) == "\n".join(
        [
            "2 stages, 4 micro-batches; Fm: forward of micro-batch m, Bm: its backward",
            "",
            "GPU:0  F0 F1 F2 F3  .  . B3 B2 B1 B0",
            "GPU:1   . F0 F1 F2 F3 B3 B2 B1 B0  .",
            "",
            "Each stage idles 20% of a step: (S-1)/(M+S-1), if all take equally long. "
            "A step takes at least 62% of the time of one device.",
        ]
    )
    assert "1 stage, 1 micro-batch;" in str(
        Pipeline(stages=("CPU:0",), micro_batches=1)
    )


def test_devices_of_several_tasks_keep_what_tells_them_apart():
    names = (
        "/job:chief/replica:0/task:0/device:CPU:0",
        "/job:worker/replica:0/task:0/device:CPU:0",
    )

    picture = str(Pipeline(stages=names, micro_batches=1)).splitlines()

    assert picture[2].startswith("job:chief/replica:0/task:0/CPU:0 ")
    assert picture[3].startswith("job:worker/replica:0/task:0/CPU:0 ")
