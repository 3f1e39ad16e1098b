"""`strop sft` as a function: imitate demonstrations."""

from strop.runtime.sft.run import SFTResult, sft

__all__ = ["SFTResult", "sft"]
