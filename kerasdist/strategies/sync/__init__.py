"""Synchronous strategies: the base that users' strategies share.

`extended` puts the hooks of `_keras.protocols` together, from what is in
`strategies.reduce`, `.measure` and here in `data`.
"""
