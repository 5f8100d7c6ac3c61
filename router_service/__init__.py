"""Sends each request to the backend where it finishes soonest, and relays the tokens."""
