"""Whether data of two ranks are the same, and what they hold."""
