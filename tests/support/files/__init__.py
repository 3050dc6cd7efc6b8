"""Files that tests write, change and read."""
