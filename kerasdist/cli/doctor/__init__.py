"""`kerasdist doctor`: what is here, what is wrong, and the remedy.

It looks only: it starts no job and changes nothing.
"""
