"""Elastic jobs: the launcher lets the others go on without a worker that has ended.

Its options, the restarts of lost workers, the output of the present chief, and the
outcome. How the workers continue is the strategy's matter.
"""
