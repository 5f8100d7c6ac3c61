"""What the router and the backends share: serving, health, errors, telemetry, settings, requests."""

import os

# gRPC reads this once, when it is imported. By itself it writes a line past every log format whenever a peer goes away.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
