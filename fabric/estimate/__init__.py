"""What one job costs on one fabric: traffic by group, time of a step, memory, goodput, and its worst misplacement.

It applies the formulas of `fabric/cost` to a model, its axes and the places of its ranks. Pure. The launcher may
import it.

May import: `fabric.cost`, `fabric.groups`, `fabric.model`, `fabric.placement`.
"""
