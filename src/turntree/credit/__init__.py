"""From the rewards of leaves to the credit of nodes. Plain numbers, no torch."""
