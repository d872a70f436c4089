"""Estimators of scikit-learn, each fitted at one site, and models that combine them."""
