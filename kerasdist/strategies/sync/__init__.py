"""Strategies in step: the base that users' strategies share.

`hooks` is what they do in Keras's place (`_keras.protocols`). Each of its methods is a
few lines: the work is in `strategies.reduce`, `.data`, `.chief_data` and `.measure`.
"""
