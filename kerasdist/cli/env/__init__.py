"""`kerasdist env`: the facts that a report of a bug needs.

It judges nothing, which `kerasdist doctor` does, and never fails: a part that can't be
read contains the reason.
"""
