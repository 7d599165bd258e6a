"""The calls of a step as each rank logs them, and logs that are read together."""
