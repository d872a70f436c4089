"""Assembly of a session: stores, journal, driver and servers, put together from a configuration."""
