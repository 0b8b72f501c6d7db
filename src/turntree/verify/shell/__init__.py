"""Shell scripts by what they do: `script` reads one, `commands` is the table of what options mean."""
