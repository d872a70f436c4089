"""Figures of too few sites, which a model does not tell the others."""

from json import loads

import numpy as np
import pytest

from support.learning import table_of
from xain_workloads.class_weights import KEY as CLASS_WEIGHTS
from xain_workloads.errors import DataError
from xain_workloads.tables.checks.checking import check
from xain_workloads.tables.preprocessing import KEY, Preprocessing, preprocessing_of
from xain_workloads.tables.profile import DataProfile
from xain_workloads.tables.reading.scales import Scale
from xain_workloads.workload import create, initial_model

ROWS = 40


def site(
    seed: int,
    wards: tuple[str, ...] = ("north", "south"),
    *,
    creatinine: bool = False,
    classes: tuple[str, ...] = ("no", "yes"),
    num_missing: int = 0,
) -> DataProfile:
    random = np.random.default_rng(seed)
    age = random.normal(60.0, 10.0, ROWS)
    age[:num_missing] = np.nan
    values = {"age": age, "ward": np.array([wards[i % len(wards)] for i in range(ROWS)], object)}
    if creatinine:
        values["creatinine"] = random.normal(90.0, 5.0, ROWS)
    target = np.array([classes[i % len(classes)] for i in range(ROWS)], object)
    return table_of(values, target).profile()


def made_of(
    *sites: DataProfile, min_sites: int = 2, name: str = "sgd", **options: object
) -> tuple[Preprocessing, dict[str, str]]:
    """Preprocessing and metadata of the first model of these sites."""
    metadata = dict(initial_model(create(name, options), sites, min_sites=min_sites).metadata)
    preprocessing = preprocessing_of(metadata)
    assert preprocessing is not None
    return preprocessing, metadata


def test_number_of_one_site_has_no_figure_in_the_model():
    """The column is not scaled, and its share of missing values, which follows from the rows of the
    site, is not told. With another site that has the column all is told."""
    alone = site(0, creatinine=True), site(1), site(2)
    preprocessing, metadata = made_of(*alone)
    told = dict(zip((c.name for c in preprocessing.numbers), preprocessing.numbers, strict=True))
    assert told["creatinine"].scale == Scale(0.0, 1.0)
    assert (told["creatinine"].fill, told["creatinine"].unknown) == (0.0, 0.0)
    assert told["age"].scale.center == pytest.approx(60.0, abs=5.0)
    assert "9" not in str(told["creatinine"])  # its mean is 90
    both, _ = made_of(alone[0], site(1, creatinine=True), site(2))
    assert both.numbers[1].scale.center == pytest.approx(90.0, abs=2.0)
    assert made_of(*alone, min_sites=1)[0].numbers[1].scale.center == pytest.approx(90.0, abs=2.0)
    assert KEY in metadata


def test_category_of_one_site_is_not_named_in_the_model():
    preprocessing, metadata = made_of(site(0, ("north", "south", "hospice")), site(1), site(2))
    (ward,) = preprocessing.categories
    assert ward.categories == ("north", "south")
    assert ward.unknown == 0.0  # all unknown rows are of that site
    assert "hospice" not in str(metadata)


def test_missing_values_of_one_site_are_not_told():
    preprocessing, _ = made_of(site(0, num_missing=9), site(1), site(2))
    assert preprocessing.numbers[0].unknown == 0.0
    preprocessing, _ = made_of(site(0, num_missing=9), site(1, num_missing=9), site(2))
    assert preprocessing.numbers[0].unknown == 0.15


def test_figures_of_more_sites_are_those_without_a_limit():
    """Bit for bit."""
    sites = [site(seed, creatinine=True) for seed in range(3)]
    assert made_of(*sites, min_sites=3) == made_of(*sites, min_sites=1)


def test_class_of_one_site_weighs_one():
    """The number of its rows follows neither from its weight nor from those of the others."""
    sites = site(0, classes=("no", "yes", "yes")), site(1), site(2, classes=("no", "yes", "maybe"))
    _, metadata = made_of(*sites, class_weight="balanced")
    maybe, no, yes = loads(metadata[CLASS_WEIGHTS])
    assert maybe == 1.0
    assert (no, yes) == (pytest.approx(107 / (2 * 48)), pytest.approx(107 / (2 * 59)))


def test_target_of_one_site_makes_no_model():
    """A regression cannot be trained without its mean."""
    large, small = (table_of({"age": np.arange(n)}, np.arange(n)).profile() for n in (40.0, 4.0))
    with pytest.raises(DataError, match=r"told by 1 of 2 sites, and schema\.min_sites is 2"):
        made_of(large, small, task="regression")
    made_of(large, large, task="regression")


def test_findings_tell_what_is_withheld():
    """The name of the category is told to the site alone that has it."""
    sites = {
        "icu": site(0, ("north", "hospice"), creatinine=True),
        "north": site(1),
        "west": site(2),
    }
    found = [one for one in check(sites.items(), min_sites=2) if one.check == "withheld"]
    assert [(one.level, one.site, one.column) for one in found] == [
        ("warn", "", "creatinine"),
        ("note", "icu", "ward"),
    ]
    assert "1 of 3 sites tells of its values, and schema.min_sites is 2" in found[0].text
    assert "'hospice'" in found[1].text
    assert not any(one.check == "withheld" for one in check(sites.items()))
