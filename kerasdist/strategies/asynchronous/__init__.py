"""Workers that don't wait for each other: weights, batches, who is there."""
