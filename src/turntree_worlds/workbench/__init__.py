"""Floor 2.5: work at a shell: tasks in a folder (`--environment terminal`), bugs in small packages (`swe`)."""
