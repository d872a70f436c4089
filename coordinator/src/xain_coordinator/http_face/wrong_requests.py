"""Sentence about the keys of a request that cannot be used."""

from collections.abc import Mapping, Sequence
from typing import Any

MAX_PATH = 200  # characters of a path of keys in a message

# "it must be ..." by pydantic's name of the mistake; what is in braces comes with the mistake.
_MUST = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of at most 64 bits",
    "int_type": "a whole number",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "one of: {expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "string_too_long": "text of at most {max_length} characters",
    "string_too_short": "text of at least {min_length} character(s)",
    "string_type": "text",
    "too_long": "a list of at most {max_length} items",
    "too_short": "a list of at least {min_length} item(s)",
}


def sentence(errors: Sequence[Mapping[str, Any]], body: object) -> str:
    """Describe the first mistake of a request.

    errors: as pydantic lists them, with one for each member of a union that does not fit.
    body: what the request had, to tell its keys from the names of the members.
    """
    path = _path(errors[0], body)
    here = [error for error in errors if _path(error, body) == path]
    kind = here[0]["type"]
    if kind == "json_invalid":
        return "the body is no JSON"
    if kind == "value_error":  # of a validator of ours
        return f"{path}: {here[0]['ctx']['error']}"
    if kind == "missing":
        return f"{path}: it must be given"
    if kind == "extra_forbidden":
        return f"{path}: there is no such key"
    musts = dict.fromkeys(_must(error) for error in here)
    return f"{path}: it must be {' or '.join(musts)}"


def _path(error: Mapping[str, Any], body: object) -> str:
    """The keys that lead to what is wrong: "body.rows.0.2"."""
    first, *steps = error["loc"]
    keys = [first]
    for step in steps:
        is_item = isinstance(body, list) and isinstance(step, int) and step < len(body)
        if is_item or (isinstance(body, dict) and step in body):
            body = body[step]  # type: ignore[index]  # a list or a dict, see above
        elif first == "body" and error["type"] != "missing":
            break
        keys.append(step)
    return ".".join(map(str, keys))[:MAX_PATH]


def _must(error: Mapping[str, Any]) -> str:
    """The kind of value that a key must have, in words."""
    text = _MUST.get(error["type"], "as /v1/docs describes it")
    return text.format_map(error.get("ctx", {}))
