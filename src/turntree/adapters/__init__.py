"""Environments of other packages: each is a registered name (`gymnasium:FrozenLake-v1`) and an optional extra."""
