"""Places that bytes live in."""
