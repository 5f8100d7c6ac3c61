"""One model on one device, served over gRPC with its own scheduler and KV cache."""

import service_kit  # noqa: F401 - before anything imports gRPC
