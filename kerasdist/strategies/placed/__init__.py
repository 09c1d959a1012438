"""Layers on several devices: placement, hybrid replicas, other workers' devices.

Placements are planned in `kerasdist.placement`; the hooks in Keras are in
`_keras.placement`.
"""
