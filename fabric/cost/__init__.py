"""What a job costs before it is queued: time of collectives, memory, roofline, pipeline, tokens a day, goodput.

Each function states its formula, units and source; docs/PLANNING.md lists them all. Pure: numbers in, numbers out. It
may import the fabric's model and groups. The launcher and placement may import it.

May import: `fabric.model`.
"""
