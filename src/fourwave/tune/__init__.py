"""Search for configurations, and the winners kept on disk (cache.py). On only where FOURWAVE_AUTOTUNE=1."""
