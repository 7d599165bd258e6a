"""`-j`: cases that run at the same time."""
