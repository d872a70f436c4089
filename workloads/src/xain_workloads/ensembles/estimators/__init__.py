"""Estimators of scikit-learn: which are known, how they are described, and their files."""
