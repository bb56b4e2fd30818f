"""Find and lay out checkpoints in safetensors files."""
