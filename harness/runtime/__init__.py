"""Rules for bitproof's own processes: imported packages, interrupts, output, caches and temporary folders."""
