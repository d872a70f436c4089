"""Messages and services of the federated-learning protocol (generated)."""
