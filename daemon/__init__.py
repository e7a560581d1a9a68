"""The long-running processes: node daemon, agent and coordinator.

May import: nothing.
"""

import os

# Servers speak TLS 1.3 only. gRPC has no setting for the lowest version of TLS. This is the only cipher suite that it
# may use with TLS 1.2, and it needs a key that both sides share before. No server has one, so TLS 1.2 never succeeds.
# The suites of TLS 1.3 are not affected. gRPC reads the variable when it is imported, so this package sets it first.
# Ranks do not inherit it (rank_environment.py).
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-PSK-AES128-CBC-SHA"
