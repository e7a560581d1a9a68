"""Copies of plain tensors into slots, at the speed of memory: at once, or beside the next forward and backward pass.

The caller says where in a slot a tensor lies.

May import: `checkpoint.training.states`.
"""
