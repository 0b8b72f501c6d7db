"""Where programs and commands that a model wrote are run, contained (docs/design/sandbox.md)."""
