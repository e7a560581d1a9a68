"""What can go wrong in a simulated world: one module for each kind of fault, and their weights."""
