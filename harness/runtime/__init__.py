"""The surroundings of bitproof's own processes: imports, interrupts, output, caches and temporary folders."""
