"""Records a training step as a single graph."""
