"""Servers of an elastic job, which sum the gradients of one epoch after the other.

The workers agree on their members by themselves (`kerasdist.collectives.elastic`). For
each epoch they connect to the servers as for a job of its own. A server holds nothing
between two steps, so a lost one is replaced by the others.
"""
