"""What a rank shows of its own work: signs of life, the times of its steps, the collectives that it has entered, and
what its script says of a step.

May import: `checkpoint.format`.
"""
