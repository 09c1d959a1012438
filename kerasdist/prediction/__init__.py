"""The steps of a job of many workers, computed from the measured step of one.

`profile` has the measured step, `links` the network, `schedules` the time of each
collective, `simulation` the steps of a job, `report` its tables. No module needs
TensorFlow: a profile is measured by `kerasdist predict`.
"""
