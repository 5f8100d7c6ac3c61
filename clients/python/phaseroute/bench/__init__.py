"""Scenarios played over gRPC against services that run: `phaseroute bench`."""
