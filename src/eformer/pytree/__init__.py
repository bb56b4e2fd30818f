"""The documented msgpack and state-dict API, as thin functions over the engine."""
