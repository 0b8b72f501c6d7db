"""Work at a shell: tasks in a folder (`--environment terminal`), bugs in small packages (`swe`)."""
