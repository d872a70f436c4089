"""Checks over the data profiles of all sites, before a model is made of them."""
