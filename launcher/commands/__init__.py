"""The commands of `muster`, one a file."""
