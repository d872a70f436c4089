"""The weights of XAIN 0.6: pickled arrays under bare keys, as its own participants expect them."""
