"""Log lines that a blocked standard error can't hold up."""
