"""Who is played, forked, stopped and kept: gates, branchers, filters."""
