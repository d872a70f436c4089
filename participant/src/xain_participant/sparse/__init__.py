"""Workers that train sparse models with a parameter server."""
