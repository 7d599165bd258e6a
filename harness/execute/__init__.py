"""Turn a case into recordings: client, host, ranks, and how failures are reported."""
