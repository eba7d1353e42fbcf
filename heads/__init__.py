"""Heads on torch: what is put behind a backbone."""

from heads.dino import DINOHead
from heads.linear import HeadSpec

__all__ = ["DINOHead", "HeadSpec"]
