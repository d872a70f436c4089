"""Process of a coordinator: start, checks before it, signals, exit statuses."""
