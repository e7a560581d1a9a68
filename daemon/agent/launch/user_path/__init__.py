"""A folder for PYTHONPATH of users' programs. It holds one module for any interpreter from Python 3.9 on.

May import: nothing.
"""
