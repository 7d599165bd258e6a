"""Systems: objects that take training steps. Some are built in, some run a graph, others are a user's own."""
