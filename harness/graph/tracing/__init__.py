"""Records a training step as one graph."""
