"""Above floor 2: what a policy may call. Every call is cached, bounded, counted, and fails as a failure."""
