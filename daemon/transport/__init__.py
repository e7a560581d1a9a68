"""What all processes use to talk: gRPC channels, identity, authorization, reachability probes, fencing timeouts, site
settings.

Imports only `daemon.host` and the wire. Every program imports it.
"""
