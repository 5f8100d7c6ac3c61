"""One model on one device, served over gRPC with its own scheduler and KV cache."""
