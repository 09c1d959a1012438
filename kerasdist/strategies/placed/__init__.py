"""Layers on several devices: placement, hybrid replicas, other workers' devices.

Which layer goes where is planned in `kerasdist.placement`; Keras's side of it is in
`_keras.placement`.
"""
