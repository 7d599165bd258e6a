"""Rules for our own processes: imported packages, interrupts, and output."""
