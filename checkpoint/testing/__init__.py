"""A gang in one process, or with a process for each agent, for tests and benchmarks. It connects `checkpoint.training`
with `checkpoint.store`.

No program imports it.
"""
