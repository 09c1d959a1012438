"""TensorFlow's own collectives as a transport."""
