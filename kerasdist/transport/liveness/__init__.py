"""Lost workers: control connections, the failure detector, and who is told."""
