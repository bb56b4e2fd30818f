"""Read-only formats of other writers."""
