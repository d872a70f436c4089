"""The HTTP face: fit, predict and look from any program.

FastAPI and uvicorn are imported only where [http] is on.
"""
