"""The way of a gradient from a replica to all workers, and back."""
