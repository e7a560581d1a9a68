"""What tests and benchmarks need to judge a placement: fabrics of regular shape, and the exact optimum."""
