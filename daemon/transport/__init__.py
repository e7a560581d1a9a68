"""What every process speaks: gRPC channels, identity, authorization, reachability probes, fencing timeouts, site
settings.

Imports `daemon.host` and the wire only. Every program imports it.
"""
