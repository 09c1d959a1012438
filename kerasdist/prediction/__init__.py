"""The steps of a job of many workers, computed from the measured step of one.

`profile` has the measured step and the network, `simulation` the time of each
collective and the steps of a job, `report` their tables. No module needs TensorFlow: a
profile is measured by `kerasdist predict`.
"""
