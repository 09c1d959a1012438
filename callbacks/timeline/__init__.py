"""`Timeline`: some steps of all ranks as one trace.

`callback` records and gathers, `trace` and `xplane` write the files.
"""
