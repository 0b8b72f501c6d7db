"""The tools of a policy. Calls are cached, limited in time and counted; a failure is a typed result."""
