"""A fleet in virtual time: the real scheduler rules and the real policies, no sleeping. Every figure is simulated."""
