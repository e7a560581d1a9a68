"""What one machine offers: clock, process trees, packets with file descriptors, worker threads,
folders that are held open, log file names.

Imports nothing of Muster except the wire. Every program imports it.
"""
