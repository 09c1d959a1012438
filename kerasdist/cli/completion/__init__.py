"""`kerasdist completion`: a script by which a shell completes `kerasdist`'s words.

The script is made from the parsers, and needs neither Python nor a package when it
completes.
"""
