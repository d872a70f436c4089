"""Trained models as files that anybody can use: their formats, and predictions from them."""
