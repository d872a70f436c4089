"""The coordinator: rounds, aggregation, recovery, and the servers around them."""
