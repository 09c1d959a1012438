"""Strategies in step: the base that users' strategies share, and what it knows."""
