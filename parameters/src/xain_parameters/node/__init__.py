"""A server node: it keeps key ranges, and copies them to other servers.

protocol.py, primary.py, backup.py and copy.py decide and do no I/O; ports.py says what they need;
log.py and cuts.py write files; server.py is the process.
"""
