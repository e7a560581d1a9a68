"""The gRPC services: messages are converted into events, state is converted into views.

Imports `shell` and `core`. `server` imports it.
"""
