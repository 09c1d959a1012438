"""Synchronous strategies: the base that users' strategies share.

`hooks` implements `_keras.protocols`. Each of its methods is a
few lines: the work is in `strategies.reduce`, `.data`, `.chief_data` and `.measure`.
"""
