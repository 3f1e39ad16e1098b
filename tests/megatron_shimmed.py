"""Importing it puts the shim in place, where the environment asks for it: in the process that ranks are forked from."""

import os

import megatron_shim

ASKED = "STROP_TESTS_WITH_MEGATRON"

if os.environ.get(ASKED):
    megatron_shim.install()
