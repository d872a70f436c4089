"""Messages and services of the messaging toolkit (generated)."""
