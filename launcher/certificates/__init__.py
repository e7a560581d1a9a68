"""What `muster pki` makes and shows: the files of an authority and of its certificates.

Promises that no other command imports cryptography. Only `commands` imports this folder.

May import: `daemon.host`, `daemon.transport`, `launcher`.
"""
