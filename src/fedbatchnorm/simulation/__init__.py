"""Federated training on one device, a whole round in one pass. Needs torch and numpy alone."""
