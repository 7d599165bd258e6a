"""Systems, which take training steps: built-in systems, a user's own, and the graph pipeline's."""
