"""The operator calls of a step, as each rank logs them, and the logs of all ranks read together."""
