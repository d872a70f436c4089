"""The server's loop in cells of a notebook, whose event loop runs meanwhile."""

import ast

import nbformat
from nbclient import NotebookClient

CELLS = (
    """
import threading
import numpy as np
import xain

def train(name):
    for round in xain.rounds({"w": np.zeros(3)}, id=name, coordinator=session.address):
        round.submit({"w": round.weights["w"] + round.config.lr}, samples=10)

session = xain.session(
    {"w": np.zeros(3)}, rounds=3, min_participants=2, address="127.0.0.1:0", linger_s=0.0
)
""",
    """
with session:
    sites = [threading.Thread(target=train, args=(name,)) for name in ("east", "west")]
    for site in sites:
        site.start()
    for round in session:
        round.configure(lr=0.5)
        record = round.run()
""",
    "[session.result.model, session.result.weights['w'].tolist()]",
)


async def test_loop_runs_in_a_notebook(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in CELLS])
    client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}})
    await client.async_execute()
    *_, loop, result = notebook.cells
    told = "".join(one["text"] for one in loop.outputs)
    assert "round 3/3: 2 updates in" in told
    assert ast.literal_eval(result.outputs[0]["data"]["text/plain"]) == [3, [1.5, 1.5, 1.5]]
