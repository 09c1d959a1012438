import pytest
from elastic_members import check, start


@pytest.mark.soak
def test_one_joins_after_one_whose_clock_was_ahead(tmp_path):
    """By an hour: the first process that is started again, which dies, too."""
    folder = str(tmp_path)
    clock = f"""
if cluster.rank == 2:
    starts = len(os.listdir({folder!r}))
    open(os.path.join({folder!r}, str(starts)), "w").close()
    if starts == 1:
        now = time.time
        time.time = lambda: now() + 3600
    else:
        del options["dies"]
"""
    options = {"turns": 600, "full": True, "dies": 1.0, "handover": False}
    with start(3, ends=[[2, 7, 9]], before=clock, **options) as job:
        for _ in range(2):
            assert job.wait_one(2).returncode == -9
            job.start_again(2)
        for each in job.succeed():
            check(each, 3)
            assert each.result["last"] == [0, 1, 2]
