"""Questions to the Inspection service of a coordinator that runs, and their answers."""
