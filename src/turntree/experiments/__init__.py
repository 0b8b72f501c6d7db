"""What the methods are worth: matched arms over seeds, the quickstart, and the pages of both."""
