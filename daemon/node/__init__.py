"""musterd, the node daemon."""
