"""Pickles of the float32 vector [1.5, -2, 3.14159274] and of the empty one of float64, as old and
new versions of Python and numpy wrote them."""

from base64 import b64decode

VECTORS = {
    "python 3.6.15, numpy 1.16.6, protocol 3": b64decode(
        "gANjbnVtcHkuY29yZS5tdWx0aWFycmF5Cl9yZWNvbnN0cnVjdApxAGNudW1weQpuZGFycmF5CnEBSwCF"
        "cQJDAWJxA4dxBFJxBShLAUsDhXEGY251bXB5CmR0eXBlCnEHWAIAAABmNHEISwBLAYdxCVJxCihLA1gB"
        "AAAAPHELTk5OSv////9K/////0sAdHEMYolDDAAAwD8AAADA2w9JQHENdHEOYi4="
    ),
    "python 3.6.15, numpy 1.16.6, protocol 4": b64decode(
        "gASVlgAAAAAAAACMFW51bXB5LmNvcmUubXVsdGlhcnJheZSMDF9yZWNvbnN0cnVjdJSTlIwFbnVtcHmU"
        "jAduZGFycmF5lJOUSwCFlEMBYpSHlFKUKEsBSwOFlGgDjAVkdHlwZZSTlIwCZjSUSwBLAYeUUpQoSwOM"
        "ATyUTk5OSv////9K/////0sAdJRiiUMMAADAPwAAAMDbD0lAlHSUYi4="
    ),
    "python 3.7.16, numpy 1.21.6, protocol 3": b64decode(
        "gANjbnVtcHkuY29yZS5tdWx0aWFycmF5Cl9yZWNvbnN0cnVjdApxAGNudW1weQpuZGFycmF5CnEBSwCF"
        "cQJDAWJxA4dxBFJxBShLAUsDhXEGY251bXB5CmR0eXBlCnEHWAIAAABmNHEIiYiHcQlScQooSwNYAQAA"
        "ADxxC05OTkr/////Sv////9LAHRxDGKJQwwAAMA/AAAAwNsPSUBxDXRxDmIu"
    ),
    "python 3.8.18, numpy 1.18.5, protocol 4": b64decode(
        "gASVlgAAAAAAAACMFW51bXB5LmNvcmUubXVsdGlhcnJheZSMDF9yZWNvbnN0cnVjdJSTlIwFbnVtcHmU"
        "jAduZGFycmF5lJOUSwCFlEMBYpSHlFKUKEsBSwOFlGgDjAVkdHlwZZSTlIwCZjSUSwBLAYeUUpQoSwOM"
        "ATyUTk5OSv////9K/////0sAdJRiiUMMAADAPwAAAMDbD0lAlHSUYi4="
    ),
    "python 3.8.18, numpy 1.18.5, protocol 5": b64decode(
        "gAWVgQAAAAAAAACMEm51bXB5LmNvcmUubnVtZXJpY5SMC19mcm9tYnVmZmVylJOUKJYMAAAAAAAAAAAA"
        "wD8AAADA2w9JQJSMBW51bXB5lIwFZHR5cGWUk5SMAmY0lEsASwGHlFKUKEsDjAE8lE5OTkr/////Sv//"
        "//9LAHSUYksDhZSMAUOUdJRSlC4="
    ),
    "python 3.9.18, numpy 1.26.4, protocol 4": b64decode(
        "gASVlAAAAAAAAACMFW51bXB5LmNvcmUubXVsdGlhcnJheZSMDF9yZWNvbnN0cnVjdJSTlIwFbnVtcHmU"
        "jAduZGFycmF5lJOUSwCFlEMBYpSHlFKUKEsBSwOFlGgDjAVkdHlwZZSTlIwCZjSUiYiHlFKUKEsDjAE8"
        "lE5OTkr/////Sv////9LAHSUYolDDAAAwD8AAADA2w9JQJR0lGIu"
    ),
    "python 3.12.1, numpy 2.0.2, protocol 4": b64decode(
        "gASVlQAAAAAAAACMFm51bXB5Ll9jb3JlLm11bHRpYXJyYXmUjAxfcmVjb25zdHJ1Y3SUk5SMBW51bXB5"
        "lIwHbmRhcnJheZSTlEsAhZRDAWKUh5RSlChLAUsDhZRoA4wFZHR5cGWUk5SMAmY0lImIh5RSlChLA4wB"
        "PJROTk5K/////0r/////SwB0lGKJQwwAAMA/AAAAwNsPSUCUdJRiLg=="
    ),
    "python 3.12.1, numpy 2.0.2, protocol 5": b64decode(
        "gAWVgAAAAAAAAACME251bXB5Ll9jb3JlLm51bWVyaWOUjAtfZnJvbWJ1ZmZlcpSTlCiWDAAAAAAAAAAA"
        "AMA/AAAAwNsPSUCUjAVudW1weZSMBWR0eXBllJOUjAJmNJSJiIeUUpQoSwOMATyUTk5OSv////9K////"
        "/0sAdJRiSwOFlIwBQ5R0lFKULg=="
    ),
    "python 3.13.0, numpy 2.3.2, protocol 4": b64decode(
        "gASVlQAAAAAAAACMFm51bXB5Ll9jb3JlLm11bHRpYXJyYXmUjAxfcmVjb25zdHJ1Y3SUk5SMBW51bXB5"
        "lIwHbmRhcnJheZSTlEsAhZRDAWKUh5RSlChLAUsDhZRoA4wFZHR5cGWUk5SMAmY0lImIh5RSlChLA4wB"
        "PJROTk5K/////0r/////SwB0lGKJQwwAAMA/AAAAwNsPSUCUdJRiLg=="
    ),
    "python 3.13.0, numpy 2.3.2, protocol 5": b64decode(
        "gAWVgAAAAAAAAACME251bXB5Ll9jb3JlLm51bWVyaWOUjAtfZnJvbWJ1ZmZlcpSTlCiWDAAAAAAAAAAA"
        "AMA/AAAAwNsPSUCUjAVudW1weZSMBWR0eXBllJOUjAJmNJSJiIeUUpQoSwOMATyUTk5OSv////9K////"
        "/0sAdJRiSwOFlIwBQ5R0lFKULg=="
    ),
}

EMPTY = {
    "python 3.6.15, numpy 1.16.6, protocol 3": b64decode(
        "gANjbnVtcHkuY29yZS5tdWx0aWFycmF5Cl9yZWNvbnN0cnVjdApxAGNudW1weQpuZGFycmF5CnEBSwCF"
        "cQJDAWJxA4dxBFJxBShLAUsAhXEGY251bXB5CmR0eXBlCnEHWAIAAABmOHEISwBLAYdxCVJxCihLA1gB"
        "AAAAPHELTk5OSv////9K/////0sAdHEMYolDAHENdHEOYi4="
    )
}
