"""`ScalingTensorBoard`: how a job scales, measured, explained and charted."""
