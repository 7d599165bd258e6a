"""What disturbs a run on purpose: faults that must be caught, and stress under which nothing may change."""
