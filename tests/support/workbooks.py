"""Small Excel files, without a library that writes them."""

import zipfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_TYPE = "application/vnd.openxmlformats-officedocument.spreadsheetml"
Cell = str | float | bool | date | None


def write_workbook(path: Path, rows: Sequence[Sequence[Cell]], sheet: str = "Data") -> None:
    """Write a workbook with one sheet. None: an empty cell."""
    data = "".join(f"<row>{''.join(map(_cell, row))}</row>" for row in rows)
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types">'
        '<Default Extension="rels" ContentType='
        '"application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{_TYPE}.sheet.main+xml"/>'
        f'<Override PartName="/xl/sheet.xml" ContentType="{_TYPE}.worksheet+xml"/>'
        f'<Override PartName="/xl/styles.xml" ContentType="{_TYPE}.styles+xml"/></Types>',
        "_rels/.rels": _relationships({"officeDocument": "xl/workbook.xml"}),
        "xl/workbook.xml": f'<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}"><sheets>'
        f'<sheet name="{sheet}" sheetId="1" r:id="worksheet"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": _relationships(
            {"worksheet": "sheet.xml", "styles": "styles.xml"}
        ),
        "xl/styles.xml": f'<styleSheet xmlns="{_MAIN}"><cellXfs count="2"><xf numFmtId="0"/>'
        '<xf numFmtId="14"/></cellXfs></styleSheet>',
        "xl/sheet.xml": f'<worksheet xmlns="{_MAIN}"><sheetData>{data}</sheetData></worksheet>',
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in parts.items():
            archive.writestr(name, f'<?xml version="1.0" encoding="UTF-8"?>{text}')


def _relationships(targets: dict[str, str]) -> str:
    entries = "".join(
        f'<Relationship Id="{kind}" Type="{_OFFICE}/{kind}" Target="{target}"/>'
        for kind, target in targets.items()
    )
    return f'<Relationships xmlns="{_PACKAGE}/relationships">{entries}</Relationships>'


def _cell(value: Cell) -> str:
    match value:
        case None:
            return "<c/>"
        case bool():
            return f'<c t="b"><v>{int(value)}</v></c>'
        case date():
            return f'<c s="1"><v>{(value - date(1899, 12, 30)).days}</v></c>'
        case str():
            return f'<c t="inlineStr"><is><t>{value}</t></is></c>'
    return f"<c><v>{value}</v></c>"
