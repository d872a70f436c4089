"""Pure machine learning: data loading and the workloads that participants run. No network."""
