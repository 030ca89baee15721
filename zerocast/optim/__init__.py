"""Optimizers that own the masters: who owns which shard, and when to communicate."""

from zerocast.checkpoint.checkpoint import load, save
from zerocast.checkpoint.checkpoints import Checkpoints
from zerocast.optim.config import ZeroConfig
from zerocast.optim.ema import EMA
from zerocast.optim.optimizers import ZeroAdamW, ZeroMuon
from zerocast.optim.pretrained import full_state_dict, load_masters

__all__ = [
    "EMA",
    "Checkpoints",
    "ZeroAdamW",
    "ZeroConfig",
    "ZeroMuon",
    "full_state_dict",
    "load",
    "load_masters",
    "save",
]
