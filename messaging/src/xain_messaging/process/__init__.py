"""What every process of a fleet needs before it can talk: settings, addresses and logs."""
