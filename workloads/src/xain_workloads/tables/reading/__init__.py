"""Reading of tables: files of several formats, and what their cells mean."""
