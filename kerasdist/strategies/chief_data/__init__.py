"""Data that differ between the ranks: found, decided on, and sent by the chief."""
