"""What one machine offers: clock, process trees, packets with file descriptors, worker threads,
folders that are held open, log file names, the series of what ranks did over time.

Every program imports it.

May import: nothing.
"""
