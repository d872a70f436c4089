"""All paths and bodies of the HTTP face as one page, without scripts, and without anything of
another host: FastAPI's own page is blank where there is no internet."""

import json
from collections.abc import Mapping
from html import escape
from typing import Any

# A browser that reads the page may ask for nothing at all.
HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}

_STYLE = """
body { margin: 2rem auto; padding: 0 1rem; max-width: 60rem; font: 15px/1.5 system-ui, sans-serif;
  color-scheme: light dark; }
h2 { font-size: 1.1rem; margin: 2rem 0 .25rem; } h2, pre, td:first-child { font-family: monospace; }
p { margin: .25rem 0; white-space: pre-line; } td { padding: 0 1rem .1rem 0; vertical-align: top; }
pre { overflow-x: auto; border: 1px solid #8888; padding: .5rem; }
"""


def docs_page(openapi: Mapping[str, Any], url: str) -> str:
    """The HTML page of all paths and bodies. openapi: their description. url: of the
    description."""
    info, schemas = openapi["info"], openapi["components"]["schemas"]
    operations = [
        _operation(f"{method.upper()} {path}", operation)
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    ]
    bodies = [
        f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(schema.get("description", ""))}</p>'
        f"<pre>{escape(json.dumps(_plain(schema), indent=2))}</pre>"
        for name, schema in schemas.items()
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(info['title'])}</h1><p>{escape(info['description'])}</p>"
        f'<p>The same for programs: <a href="{escape(url)}">{escape(url)}</a></p>'
        f"{''.join(operations)}<h1>Bodies</h1>{''.join(bodies)}</body></html>\n"
    )


def _operation(title: str, operation: Mapping[str, Any]) -> str:
    """A method of a path as HTML: what it does, parameters, body and answers."""
    rows = [
        (parameter["name"], f"in the {parameter['in']}. {parameter.get('description', '')}")
        for parameter in operation.get("parameters", ())
    ]
    told = [(escape(name), escape(text)) for name, text in rows]
    if "requestBody" in operation:
        told.append(("body", _body(operation["requestBody"])))
    for status, response in operation["responses"].items():
        text = escape(response["description"])
        told.append((escape(status), f"{text} {_body(response)}"))
    listed = "".join(f"<tr><td>{name}</td><td>{text}</td></tr>" for name, text in told)
    about = escape(operation.get("description", ""))
    return f"<h2>{escape(title)}</h2><p>{about}</p><table>{listed}</table>"


def _body(about: Mapping[str, Any]) -> str:
    """Links to the schemas of a request's or an answer's body."""
    schemas = [kind.get("schema", {}) for kind in about.get("content", {}).values()]
    schemas += [one for schema in schemas for one in schema.get("anyOf", ())]
    names = [escape(one["$ref"].rpartition("/")[2]) for one in schemas if "$ref" in one]
    return " ".join(f'<a href="#{name}">{name}</a>' for name in names)


def _plain(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema without description and title."""
    return {key: value for key, value in schema.items() if key not in ("description", "title")}
