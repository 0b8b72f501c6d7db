"""Above floor 2: the tools of a policy. Calls are cached, limited in time and counted; a failure is a typed result."""
