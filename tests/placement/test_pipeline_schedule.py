from kerasdist.placement.micro_batch_order import Pipeline


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
    three = str(Pipeline(stages=("A", "B", "C"), micro_batches=1)).splitlines()
    assert three[2:5] == [
        "A  F0  .  .  .  . B0",
        "B   . F0  .  . B0  .",
        "C   .  . F0 B0  .  .",
    ]
    assert "1 stage, 1 micro-batch;" in str(Pipeline(stages=("A",), micro_batches=1))


def test_devices_of_several_tasks_keep_what_tells_them_apart():
    names = (
        "/job:chief/replica:0/task:0/device:CPU:0",
        "/job:worker/replica:0/task:0/device:CPU:0",
    )

    picture = str(Pipeline(stages=names, micro_batches=1)).splitlines()

    assert picture[2].startswith("job:chief/replica:0/task:0/CPU:0 ")
    assert picture[3].startswith("job:worker/replica:0/task:0/CPU:0 ")
