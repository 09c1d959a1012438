"""Graphs of functions: what is in them, where it runs, and edges added to them."""
