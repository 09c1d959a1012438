"""`Timeline`: some steps of all ranks as one trace."""
