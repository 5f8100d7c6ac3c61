"""What arrives when: scenarios that a simulator plays in virtual time and `phaseroute bench` over gRPC, and what came
of them. Pure values; no client, no clock."""
