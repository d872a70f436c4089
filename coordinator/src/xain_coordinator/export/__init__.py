"""Take a trained model home: list the models of a session, export one, predict with it."""
