"""Tables of a key range: storage, update rules, initialisers."""
