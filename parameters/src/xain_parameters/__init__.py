"""The parameter server: tables over key ranges, clocks, replicas, checkpoints."""
