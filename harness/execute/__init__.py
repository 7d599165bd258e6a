"""Turn a case into recordings: client, host, ranks, and failure reports."""
