"""How a server treats one call, whatever it says: who has how many, and how long a message may take; and why a call has
not reached its server. It knows neither credentials nor rights, and no limit of a real server.

May import: `daemon.host`.
"""
