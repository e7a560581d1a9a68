"""What Muster's figures are measured with. Run from the repository's root: ``python -m benchmarks.bench_recovery``."""
