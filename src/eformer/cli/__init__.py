"""The command `eformer`: looks at checkpoints, whoever wrote them, without jax and without code."""
