"""Files that the package writes for itself: saved sessions, stored prefixes and the cache folder."""
