"""Configuration of a coordinator, one file per section."""
