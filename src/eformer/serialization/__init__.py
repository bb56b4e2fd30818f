"""Front door 1: the documented serialization API, as thin functions over the engine."""
