"""Doors of the shape of other libraries: programs written for them save and load with eformer."""
