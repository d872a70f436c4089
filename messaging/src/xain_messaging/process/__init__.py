"""Settings, addresses and logs, which every process of a fleet needs before it can talk."""
