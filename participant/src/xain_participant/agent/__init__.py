"""The agent: it joins, trains when it is selected, and stays alive."""
