"""Sends each request to the backend where it finishes soonest, and relays the tokens."""

import service_kit  # noqa: F401 - before anything imports gRPC
