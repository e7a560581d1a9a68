"""The benchmarks behind Muster's figures. Run them from the repository's root: ``python -m
benchmarks.bench_recovery``."""
