"""Importing it puts the shim in place: for the process that ranks are forked from."""

import megatron_shim

megatron_shim.install()
