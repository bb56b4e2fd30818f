"""The engine: trees to named leaves, leaves to bytes, bytes to stable storage, and back."""
