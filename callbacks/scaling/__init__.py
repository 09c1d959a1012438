"""`ScalingTensorBoard`: how a job scales, measured, explained and charted.

`callback` gathers windows of steps from all ranks; `metrics` and `bottleneck` are pure
functions of their numbers; `charts`, `report` and `summaries` write them. The clocks
are in `kerasdist.strategies.measure`.
"""
