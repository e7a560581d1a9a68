"""A gang in one process, for tests and benchmarks. Joins `checkpoint.training` and `checkpoint.store`.

No program imports it.
"""
