"""The container image of the test cluster: its recipe, and the build of layers that are missing or old.

May import: nothing.
"""
