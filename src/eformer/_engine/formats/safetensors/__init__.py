"""Checkpoints in safetensors files."""
