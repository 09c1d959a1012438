"""Layers on several devices, and strategies that have them."""
