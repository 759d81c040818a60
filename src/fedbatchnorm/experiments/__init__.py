"""Configurations, the paper's figures as lists of them, the runner, and the run folder."""
