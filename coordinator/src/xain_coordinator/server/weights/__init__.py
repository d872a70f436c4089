"""Transfer of models and updates."""
