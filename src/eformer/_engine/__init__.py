"""Save, load and maintain trees of arrays. Private: `eformer.checkpoint` is the public interface."""
