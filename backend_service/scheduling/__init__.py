"""In what order waiting requests are admitted: one file a policy."""
