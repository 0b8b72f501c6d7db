"""The nouns of turntree and the protocols between its parts. Standard library only."""
