"""The assignment of layers to devices: costs, cuts and tables, as pure functions.

Nothing here knows TensorFlow or Keras: costs are measured in `_keras.placement`, and a
plan is carried out in `strategies.placed`.
"""
