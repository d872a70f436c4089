"""Regression without penalty, by Newton steps over sums: the workload "glm"."""
