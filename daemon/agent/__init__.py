"""muster-agent: one per node of a gang, spares too."""
