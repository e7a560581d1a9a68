"""The unit tests keep gRPC's polling thread alive for the whole process.

grpc.aio ends this thread when the last channel or server is collected, and waits for its end. A test that fails leaves
its server open. Later the garbage collector, in any other test, would wait for this thread for ever.
"""

import grpc.aio

grpc.aio.init_grpc_aio()
