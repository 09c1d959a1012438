"""Comparison of two ranks' data: their contents, origin and hashes.

The consequences are decided in `chief_data.choice`.
"""
