"""Systems, the things that take training steps: by name, a user's own, and the graph pipeline's."""
