"""Checks over the data profiles of all sites, before a model is made of them."""

from xain_workloads.tables.checks.checking import check as check
from xain_workloads.tables.checks.findings import CHECKS as CHECKS
from xain_workloads.tables.checks.findings import Finding as Finding
from xain_workloads.tables.checks.findings import Level as Level
