"""What tests and benchmarks need to judge a placement: the exact optimum, found by branch and bound."""
