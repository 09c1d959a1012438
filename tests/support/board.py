"""What `ScalingTensorBoard` has written, read back by TensorBoard."""

import math

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util


def place(name):
    """The run and the tag of `figure/line`, which shares a chart with others."""
    figure, _, line = name.partition("/")
    if line == "all":
        return "", figure
    if line.startswith(("rank_", "stage_")):
        return line, figure
    if figure in ("step_seconds", "step_percent") and line != "whole":
        return f"part_{line}", figure
    if name in ("staleness/max", "bandwidth/link", "compression/bytes_after"):
        return "max", name
    return "", name


class Board:
    """What TensorBoard finds in a run and those below it, by `place`."""

    def __init__(self, folder):
        self.runs = {}
        for each in (folder, *(path for path in folder.iterdir() if path.is_dir())):
            accumulator = EventAccumulator(
                str(each), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0}
            )
            accumulator.Reload()
            self.runs["" if each is folder else each.name] = accumulator

    def Tensors(self, name):
        run, tag = place(name)
        return self.runs[run].Tensors(tag)

    def Tags(self):
        tags = [run.Tags()["tensors"] for run in self.runs.values()]
        return {"tensors": [tag for some in tags for tag in some]}


def series(board, tag):
    return [
        (event.step, tensor_util.make_ndarray(event.tensor_proto).item())
        for event in board.Tensors(tag)
    ]


def text(board, tag):
    return [
        tensor_util.make_ndarray(event.tensor_proto).item().decode()
        for event in board.Tensors(tag)
    ]


def near(value, other, part, rest=0.0):
    return math.isclose(value, other, rel_tol=part, abs_tol=rest)
