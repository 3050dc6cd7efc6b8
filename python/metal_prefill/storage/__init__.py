"""Files that the package writes for itself: saved sessions, packed weights and the cache folder."""
