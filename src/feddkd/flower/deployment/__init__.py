"""Servers and nodes as processes: certificates, keys, the gateway, a federation on one machine."""
