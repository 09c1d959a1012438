"""The library's log lines: where they go, and how a blocked reader can't hold them up.

All go to the logger "kerasdist" and its children. An application that has configured
logging decides what becomes of them; for others there is `default_handler`.
"""
