"""Pipeline stages: cuts the finished graph of a micro-batch into parts, orders a rank's actions, and runs them."""
