"""Messages over TCP: frames, channels of both sides, the listener, requests of a client."""
