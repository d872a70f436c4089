"""Reading what the stack's coordinator has written, from InfluxDB or from its stand-in."""

import json
import urllib.parse
import urllib.request

from influxdb_client import InfluxDBClient

ORG = BUCKET = "xain"
TIMEOUT_S = 30.0

# {participant: {milliseconds since 1970: value}}, in the order of time; "" for the coordinator.
Series = dict[str, dict[float, float]]


def read(url: str, token: str, measurement: str, field: str) -> Series:
    """All that there is of one field. token: of InfluxDB; its stand-in asks for none."""
    if _is_influxdb(url):
        return _query(url, token, measurement, field)
    return _export(url, measurement, field)


def _is_influxdb(url: str) -> bool:
    """Tell the server by its answer at a path that both have."""
    return _get(f"{url}/health").lstrip().startswith("{")


def _query(url: str, token: str, measurement: str, field: str) -> Series:
    """Query a series with Flux."""
    query = (
        f'from(bucket: "{BUCKET}") |> range(start: 0) |> filter(fn: (r) => '
        f'r._measurement == "{measurement}" and r._field == "{field}")'
    )
    found: Series = {}
    with InfluxDBClient(url, token, org=ORG, timeout=round(TIMEOUT_S * 1000)) as client:
        for table in client.query_api().query(query):
            for record in table.records:
                points = found.setdefault(record.values.get("id") or "", {})
                points[record.get_time().timestamp() * 1000] = record.get_value()
    return _in_order(found)


def _export(url: str, measurement: str, field: str) -> Series:
    """Export a series from VictoriaMetrics, which has no Flux."""
    query = urllib.parse.urlencode({"match[]": f'{{__name__="{measurement}_{field}"}}'})
    found: Series = {}
    for line in map(json.loads, _get(f"{url}/api/v1/export?{query}").splitlines()):
        points = found.setdefault(line["metric"].get("id", ""), {})
        points.update(zip(line["timestamps"], line["values"], strict=True))
    return _in_order(found)


def _in_order(series: Series) -> Series:
    return {name: dict(sorted(points.items())) for name, points in series.items()}


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        text: str = response.read().decode()
    return text
