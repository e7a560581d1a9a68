"""What a rank shows of its own work: signs of life, the times of its steps, the collectives that it has entered.

May import: nothing.
"""
