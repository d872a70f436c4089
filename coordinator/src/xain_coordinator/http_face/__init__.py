"""The HTTP face: fit, predict and status for any program.

FastAPI and uvicorn are imported only where [http] is on.
"""
