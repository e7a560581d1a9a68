"""The commands of `muster`, one in each file."""
