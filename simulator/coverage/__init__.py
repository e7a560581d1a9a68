"""What a run, or many runs, went through: edges of the state tables, rungs of the recovery ladder, faults."""
