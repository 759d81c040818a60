"""Flower stays off the network; scripts and apps are not collected."""

import os

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")

# What tests import or start; these are no tests.
collect_ignore = ["nvflare_clients.py", "nvflare_federation.py", "nvflare_processes.py", "nvflare_quickstart"]
