"""gRPC services that translate between messages and the core, and decide nothing."""
