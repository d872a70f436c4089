"""New projects from templates.

Each folder in templates/ is a template, and its name that of the template. The ending `.template`
keeps tools from taking a script in there for a part of this package.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent / "templates"
_ENDING = ".template"


def known_templates() -> tuple[str, ...]:
    """Names of the templates, sorted."""
    return tuple(sorted(folder.name for folder in _FOLDER.iterdir() if folder.is_dir()))


def new_project(template: str, folder: Path) -> list[Path]:
    """Write the files of a template. folder: a new one, or an empty one.

    Returns the files. Raises FileExistsError if something is there already, other OSErrors if the
    folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(folder)
    written = []
    for source in sorted((_FOLDER / template).iterdir()):
        file = folder / source.name.removesuffix(_ENDING)
        file.write_bytes(source.read_bytes())
        written.append(file)
    return written
