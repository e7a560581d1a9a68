"""The container test cluster."""
