"""From a case to recordings: who asks, who hosts, who runs a rank, and what becomes of a failure."""
