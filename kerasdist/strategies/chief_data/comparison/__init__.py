"""Whether the data of two ranks are the same: their contents, origin and hashes.

What follows from it is decided in `chief_data.choice`.
"""
