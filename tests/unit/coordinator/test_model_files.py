"""Files that are given as models, and are made to take all memory or the whole stack."""

import json
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
from typer.testing import CliRunner

from xain_coordinator.assembly.warm_start import load_model_file
from xain_coordinator.cli.main import app
from xain_foundation.exit_statuses import CannotStart
from xain_workloads.errors import NoModel
from xain_workloads.exported import formats, model_files
from xain_workloads.exported.model_files import (
    MAX_DEPTH,
    MAX_JSON_BYTES,
    MAX_RATIO,
    MAX_SCHEMA_BYTES,
    MAX_SMALL_BYTES,
)

MIB = 1 << 20
MAX_READ_BYTES = 24 * MIB  # while a file is refused
NESTED = "[" * 100_000 + "]" * 100_000
NESTED_OPTIONS = json.dumps({"metadata": {"options": NESTED}, "layout": []})
ZEROS = np.zeros(MAX_SMALL_BYTES // 4 + 1, np.float32)


# Nothing writes to the default array.
def write_npz(path: Path, about: str, array: np.ndarray = np.zeros(1, np.float32)) -> None:  # noqa: B008
    np.savez_compressed(path, xain=np.array(about), weights=array)


def write_safetensors(path: Path, about: str) -> None:
    from safetensors.numpy import save_file

    save_file({"weights": np.zeros(1, np.float32)}, path, metadata={"xain": about})


def write_skops(path: Path, schema: str) -> None:
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        archive.writestr("schema.json", schema)


def write_npy(path: Path, about: str) -> None:
    np.save(path, np.zeros(1, np.float32))
    path.with_suffix(".json").write_text(about)


Write = Callable[[Path], object]

# For each file, what the refusal says.
FILES: Mapping[str, tuple[Write, str]] = {
    "nested.json": (lambda path: path.write_text(NESTED), "nested"),
    "nested-options.json": (lambda path: path.write_text(f'{{"xain":{NESTED_OPTIONS}}}'), "nested"),
    "trees.json": (
        lambda path: path.write_text(
            json.dumps({"learner": {"attributes": {"xain": NESTED_OPTIONS}}})
        ),
        "nested",
    ),
    "nested.npz": (lambda path: write_npz(path, NESTED), "nested"),
    "nested-options.npz": (lambda path: write_npz(path, NESTED_OPTIONS), "nested"),
    "large.npz": (lambda path: write_npz(path, "{}", ZEROS), "unpack to"),
    "nested.safetensors": (lambda path: write_safetensors(path, NESTED), "nested"),
    "nested-options.safetensors": (lambda path: write_safetensors(path, NESTED_OPTIONS), "nested"),
    "nested.skops": (lambda path: write_skops(path, NESTED), "nested"),
    "large.skops": (lambda path: write_skops(path, " " * (MAX_SCHEMA_BYTES + 1)), "its schema has"),
    "nested.npy": (lambda path: write_npy(path, NESTED), "nested"),
    "nested-options.npy": (lambda path: write_npy(path, NESTED_OPTIONS), "nested"),
    "list.json": (lambda path: path.write_text("[]"), "no model"),
    "other.json": (
        lambda path: path.write_text('{"xain": {"columns": 3, "layout": [], "metadata": {}}}'),
        "no model",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_file_over_a_bound_is_refused_in_one_line_before_it_is_read(name, tmp_path):
    """`predict` and --from-model do, each for the formats that it reads."""
    path = tmp_path / name
    write, says = FILES[name]
    write(path)
    readers = []
    if path.suffix != ".npy":
        readers.append((formats.read, NoModel))
    if path.suffix != ".skops":
        readers.append((load_model_file, CannotStart))
    for read, error in readers:
        tracemalloc.start()
        with pytest.raises(error, match=says) as caught:
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        text = str(caught.value)
        assert text.startswith(f"{path}: ")
        assert "\n" not in text
        assert len(text) < 1000
        assert peak < MAX_READ_BYTES


def test_predict_tells_a_file_over_a_bound_without_a_traceback(tmp_path):
    FILES["nested.json"][0](tmp_path / "nested.json")
    (tmp_path / "rows.csv").write_text("a\n1\n")
    files = ["--model", str(tmp_path / "nested.json"), "--data", str(tmp_path / "rows.csv")]
    told = CliRunner().invoke(app, ["predict", *files])
    assert told.exit_code == 1
    assert "nested deeper than 100" in " ".join(told.output.split())
    assert "Traceback" not in told.output


def test_json_file_over_the_bound_is_not_read(tmp_path):
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)  # takes no room on the disk
    with pytest.raises(NoModel, match=f"and {MAX_JSON_BYTES} of JSON at most"):
        formats.read(path)


@pytest.mark.parametrize(("ratio", "is_read"), [(MAX_RATIO - 2, True), (MAX_RATIO + 2, False)])
def test_archive_may_unpack_to_a_multiple_of_its_size(ratio, is_read, tmp_path):
    path = tmp_path / "a.zip"
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        archive.writestr("noise", np.random.default_rng(0).bytes(4 * MIB))
        archive.writestr("zeros", bytes(4 * MIB * (ratio - 1)))
    if is_read:
        model_files.check_archive(path)
    else:
        with pytest.raises(ValueError, match="unpack to"):
            model_files.check_archive(path)


@pytest.mark.parametrize("text", ['"[[[{{{"' * 1000, "[]" * 1000, r'["\"[[["]', ""])
def test_brackets_in_texts_and_beside_each_other_are_no_depth(text):
    model_files.require_shallow(text)


def test_depth_of_a_long_text_is_counted():
    flat = "[" + "1," * MIB
    model_files.require_shallow(flat + "[" * (MAX_DEPTH - 1))
    with pytest.raises(ValueError, match="nested"):
        model_files.require_shallow(flat + "[" * MAX_DEPTH)
