"""The worker's side: tables, clocks, pull and push; asynchronous, synchronous, or as in ps-lite."""
