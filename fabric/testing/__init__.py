"""What tests and benchmarks need to judge a placement: fabrics of regular shape, and the exact optimum.

May import: `fabric.groups`, `fabric.model`, `fabric.placement`, `fabric.placement.maps`, `fabric.sources`.
"""
