"""What one machine offers: clock, process trees, packets with file descriptors, worker threads, log file names.

Imports nothing of Muster except the wire. Every program imports it.
"""
