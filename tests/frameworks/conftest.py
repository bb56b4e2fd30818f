"""Run the frameworks offline, and Keras on JAX. They read these variables when they are imported."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["KERAS_BACKEND"] = "jax"
