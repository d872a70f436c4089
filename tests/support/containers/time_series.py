"""Reading what the stack's coordinator has written, from InfluxDB or from its stand-in."""

import json
import ssl
import urllib.parse
import urllib.request

from influxdb_client import InfluxDBClient

ORG = BUCKET = "xain"
TIMEOUT_S = 30.0

# {participant: {milliseconds since 1970: value}}, in the order of time; "" for the coordinator.
Series = dict[str, dict[float, float]]


def read(
    url: str, token: str, measurement: str, field: str, authority: str | None = None
) -> Series:
    """All that there is of one field. token: of InfluxDB; its stand-in asks for none. authority:
    file with the certificate of the one that has signed the server's, for https."""
    context = None if authority is None else ssl.create_default_context(cafile=authority)
    if _is_influxdb(url, context):
        return _query(url, token, measurement, field, authority)
    return _export(url, measurement, field, context)


def _is_influxdb(url: str, context: ssl.SSLContext | None) -> bool:
    """Tell the server by its answer at a path that both have."""
    return _get(f"{url}/health", context).lstrip().startswith("{")


def _query(url: str, token: str, measurement: str, field: str, authority: str | None) -> Series:
    query = (
        f'from(bucket: "{BUCKET}") |> range(start: 0) |> filter(fn: (r) => '
        f'r._measurement == "{measurement}" and r._field == "{field}")'
    )
    found: Series = {}
    timeout_ms = round(TIMEOUT_S * 1000)
    with InfluxDBClient(url, token, org=ORG, timeout=timeout_ms, ssl_ca_cert=authority) as client:
        for table in client.query_api().query(query):
            for record in table.records:
                points = found.setdefault(record.values.get("id") or "", {})
                points[record.get_time().timestamp() * 1000] = record.get_value()
    return _in_order(found)


def _export(url: str, measurement: str, field: str, context: ssl.SSLContext | None) -> Series:
    """Export a series from VictoriaMetrics, which has no Flux."""
    query = urllib.parse.urlencode({"match[]": f'{{__name__="{measurement}_{field}"}}'})
    found: Series = {}
    for line in map(json.loads, _get(f"{url}/api/v1/export?{query}", context).splitlines()):
        points = found.setdefault(line["metric"].get("id", ""), {})
        points.update(zip(line["timestamps"], line["values"], strict=True))
    return _in_order(found)


def _in_order(series: Series) -> Series:
    return {name: dict(sorted(points.items())) for name, points in series.items()}


def _get(url: str, context: ssl.SSLContext | None) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as response:
        text: str = response.read().decode()
    return text
