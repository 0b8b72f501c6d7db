"""Work at a shell: tasks in a folder (`--environment terminal`)."""
