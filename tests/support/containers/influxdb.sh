#!/bin/sh
# The entry point of InfluxDB's stand-in. Points are readable at once, at /api/v1/export.
exec victoria-metrics -storageDataPath=/var/lib/influxdb2 -httpListenAddr=:8086 -retentionPeriod=1 \
    -search.latencyOffset=0s -tls -tlsCertFile="$INFLUXD_TLS_CERT" -tlsKeyFile="$INFLUXD_TLS_KEY"
