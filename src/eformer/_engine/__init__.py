"""The engine: how trees of arrays are saved, loaded and looked after. Private: `eformer.checkpoint` is the door."""
