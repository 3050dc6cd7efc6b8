"""Model folders of the Hub that tests write."""
