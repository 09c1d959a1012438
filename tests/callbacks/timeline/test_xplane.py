from tensorflow.tsl.profiler.protobuf import xplane_pb2

from kerasdist.callbacks.timeline import Record, processes, xspace
from kerasdist.strategies.measure.communication import Span
from kerasdist.strategies.measure.stages import Offset


def test_every_span_is_there():
    spans = [
        Span("all_reduce", 20_001, 30_000, 400, "#1", 7, step=1),
        Span("pack", 21_000, 23_000, 400, thread=7, step=1),
        Span("send", 24_000, 29_000, 200, thread=7, step=1),
    ]
    done = [Span("step 4", 100, 40_000)]
    ahead = [[Offset(0, 50 * rank, 10)] for rank in range(2)]
    records = [Record(r, "a:1", each, done, spans) for r, each in enumerate(ahead)]
    space = xplane_pb2.XSpace.FromString(xspace(records))
    assert [plane.name for plane in space.planes] == [
        "/device:CUSTOM:rank 0 (a:1)",
        "/device:CUSTOM:rank 1 (a:1)",
    ]
    for plane, process in zip(space.planes, processes(records), strict=True):
        lines = [(line.id, line.name, line.timestamp_ns) for line in plane.lines]
        assert lines == [(0, "step", 0), (1, "collectives", 0), (2, "send", 0)]
        for line, lane in zip(plane.lines, process.lanes, strict=True):
            found = []
            for event in line.events:
                stats = {
                    plane.stat_metadata[stat.metadata_id].name: getattr(
                        stat, stat.WhichOneof("value")
                    )
                    for stat in event.stats
                }
                name = plane.event_metadata[event.metadata_id].name
                begin = event.offset_ps // 1000
                end = begin + event.duration_ps // 1000
                found.append((name, begin, end, stats))
            expected = []
            for span in lane.spans:
                stats = {"bytes": span.size, "what": span.what}
                given = {name: value for name, value in stats.items() if value}
                expected.append((span.name, span.begin, span.end, given))
            assert found == expected
        # Numbers of names begin with 1: a number of 0 isn't kept in the file.
        assert 0 not in plane.event_metadata
        assert 0 not in plane.stat_metadata
