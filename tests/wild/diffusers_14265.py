"""diffusers' ring attention differentiates by the first turn's keys: https://github.com/huggingface/diffusers/issues/14265"""

from ring import candidate, reference

__all__ = ["candidate", "reference"]
