"""Events in the log, metrics of participants in a store, and trackers."""
