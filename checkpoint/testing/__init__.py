"""A gang in one process, for tests and benchmarks. It connects `checkpoint.training` with `checkpoint.store`.

No program imports it.
"""
