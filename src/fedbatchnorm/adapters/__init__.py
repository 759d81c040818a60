"""Federated BatchNorm on real federations: translation between an engine's messages and the library."""
