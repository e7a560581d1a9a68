"""One machine: clock, process trees, packets with file descriptors, worker threads, log file names.

Imports nothing of Muster but the wire. Every program imports it.
"""
