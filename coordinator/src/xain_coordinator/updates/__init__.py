"""Local updates, from their bytes on the wire until they count."""
