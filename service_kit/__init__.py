"""What the router and the backends share: serving, health, errors, telemetry, settings, requests."""
