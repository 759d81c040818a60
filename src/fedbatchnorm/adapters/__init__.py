"""Federated BatchNorm on engines for real federations: adapters that translate their messages."""
