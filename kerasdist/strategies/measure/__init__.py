"""How long steps and their parts take, and what was sent.

Only measured here; `kerasdist.callbacks.scaling` explains and draws it.
"""
