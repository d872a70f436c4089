import json

import pytest

from xain_foundation.settings.fields import MAX_DEPTH, parse_json


@pytest.mark.parametrize(
    "text",
    [
        "[" * MAX_DEPTH + "]" * MAX_DEPTH,
        "[" + ", ".join(["[{}]"] * MAX_DEPTH) + "]",
        json.dumps(["[" * 1000, '"' + "{" * 1000, "\\"]),
    ],
)
def test_json_that_is_not_deep_is_read(text):
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    ["[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), '{"a":' * 100_000, '"\\"[]"' + "[" * 1000],
)
def test_json_that_is_too_deep_is_refused_before_it_is_read(text):
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        parse_json(text)


@pytest.mark.parametrize("text", ['"' + '\\"' * 200_000 + "[" * 200, "[" * 101 + '"' * 200_001])
def test_text_without_an_end_is_passed_over_once(text):
    with pytest.raises(ValueError, match=r"nested more than|Unterminated"):
        parse_json(text)
