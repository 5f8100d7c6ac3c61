"""The `phaseroute` command."""

import os

# gRPC reads this once, when it is imported. By itself it writes a line to the terminal whenever a server goes away.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
