"""What a round of Flower costs."""
