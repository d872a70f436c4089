"""Addresses of other hosts in pages."""

import re

# "//" begins an address of another host in an attribute, a style and a script. The namespaces of
# SVG are names, and nothing asks for them.
OTHER_HOST = re.compile(r"(https?:)?//(?!www\.w3\.org/)[\w.-]+")
