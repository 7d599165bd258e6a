"""`bitproof merge`: merges the run folders of `run --shard`, for example from several machines of CI."""
