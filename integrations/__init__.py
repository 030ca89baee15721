"""Adapters for training hosts, installed as `zerocast.integrations`."""
