"""The participant: an SDK, and the agent that runs a workload against a coordinator."""
