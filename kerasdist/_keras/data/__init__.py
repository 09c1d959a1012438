"""Data as Keras takes and iterates over them."""
