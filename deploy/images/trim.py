"""Take out of an installation what a participant never loads:

    python trim.py SITE_PACKAGES [--keep-estimators]

scikit-learn, SciPy and Arrow install 410 MB. What is left here reads CSV, Parquet, NPZ and LIBSVM
files and trains linear models and multi-layer perceptrons; with --keep-estimators, every estimator
of scikit-learn. Tests in the images check that. The script fails if a name of the list is not
found, so that the list stays up to date. Needs `strip`.
"""

# ruff: noqa: T201 - a script speaks by printing

import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

# Whole parts that no import of ours reaches. Patterns are relative to the site-packages.
UNUSED_BY_ALL = (
    # Arrow: storage in other places, remote calls, other formats, and what C++ is compiled with.
    # Two of the three copies of libarrow_python are there for linkers only.
    "pyarrow/_azurefs.*",
    "pyarrow/_dataset*",
    "pyarrow/_feather.*",
    "pyarrow/_flight.*",
    "pyarrow/_gcsfs.*",
    "pyarrow/_hdfs.*",
    "pyarrow/_json.*",
    "pyarrow/_orc.*",
    "pyarrow/_parquet_encryption.*",
    "pyarrow/_pyarrow_cpp_tests.*",
    "pyarrow/_s3fs.*",
    "pyarrow/_substrait.*",
    "pyarrow/include",
    "pyarrow/libarrow_flight.so.*",
    "pyarrow/libarrow_python.so",
    "pyarrow/libarrow_python.so.*.*",
    "pyarrow/libarrow_python_flight.so*",
    "pyarrow/libarrow_python_parquet_encryption.so*",
    "pyarrow/libarrow_s3.so.*",
    "pyarrow/src",
    # NumPy: for its own tests, and for builds of other packages. What wraps Fortran (f2py) stays:
    # SciPy looks at each name that NumPy has.
    "numpy/_core/_simd.*.so",
    "numpy/distutils",
    # cryptography: what compiles its modules for C; the library that they need beside is one file.
    "cffi",
    "pycparser",
    # SciPy: the numbers of a method that needs megabytes of them.
    "scipy/stats/_sobol_direction_numbers.npz",
    # scikit-learn: pictures.
    "sklearn/datasets/images",
)
# SciPy and scikit-learn: models and methods that only `bagging` can use.
ESTIMATORS = (
    "scipy/cluster",
    "scipy/datasets",
    "scipy/fftpack",
    "scipy/io/_fast_matrix_market/_fmm_core.*",
    "scipy/odr",
    "scipy/signal",
    "scipy/stats/_unuran",
    "sklearn/cluster",
    "sklearn/covariance",
    "sklearn/cross_decomposition",
    "sklearn/decomposition",
    "sklearn/ensemble",
    "sklearn/feature_selection",
    "sklearn/gaussian_process",
    "sklearn/impute",
    "sklearn/inspection",
    "sklearn/manifold",
    "sklearn/mixture",
    "sklearn/neighbors",
    "sklearn/semi_supervised",
    "sklearn/tree",
)
UNUSED = (*UNUSED_BY_ALL, *ESTIMATORS)
# Folders of all installed packages.
TEST_FOLDERS = ("test", "tests")
FOR_COMPILERS = ("*.a", "*.c", "*.cpp", "*.h", "*.hpp", "*.pxd", "*.pxi", "*.pyi", "*.pyx", "*.tp")
# Without the libraries in *.libs: their sections were moved when they were packed, and strip
# breaks them.
STRIPPED = ("cryptography", "msgspec", "numpy", "pyarrow", "scipy", "sklearn", "xxhash")


def main(site_packages: Path, unused: Sequence[str]) -> None:
    before = size(site_packages)
    missing = [pattern for pattern in unused if not any(site_packages.glob(pattern))]
    if missing:
        sys.exit(f"trim.py: not found, so take them off the list: {', '.join(missing)}")
    for pattern in unused:
        remove(site_packages.glob(pattern))
    for name in TEST_FOLDERS:
        remove(path for path in site_packages.rglob(name) if path.is_dir())
    for pattern in FOR_COMPILERS:
        remove(site_packages.rglob(pattern))
    for name in STRIPPED:
        libraries = [path for path in (site_packages / name).rglob("*.so*") if path.is_file()]
        subprocess.run(["strip", "--strip-unneeded", *libraries], check=True)
    print(f"trim.py: {before / 1e6:.0f} MB, now {size(site_packages) / 1e6:.0f} MB")


def remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    keeps_estimators = "--keep-estimators" in sys.argv[2:]
    main(Path(sys.argv[1]), UNUSED_BY_ALL if keeps_estimators else UNUSED)
