"""The services of gRPC: calls in, commands and questions to the driver, answers out."""
