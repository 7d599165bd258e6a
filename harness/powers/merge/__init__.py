"""`bitproof merge`: merges the run folders of `run --shard`, such as those of CI's machines."""
