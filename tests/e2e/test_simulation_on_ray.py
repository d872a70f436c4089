"""xain.simulate(backend="ray"): workers as actors of a cluster, on two nodes of this machine."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import support.simulated as scripts
import xain
from support.process import PATIENCE_S

pytest.importorskip("ray", reason="the extra xain-session[ray] is not installed")

pytestmark = pytest.mark.e2e
