"""Files that Keras writes, on several workers."""
